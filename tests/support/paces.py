"""How long the parts of runs took, which tests of the estimate of the time that is left replay.

A number is the seconds of a step, e and a number those of an evaluation, c and a number those of a checkpoint, in their
order. They are seconds of the processor, so that other programs on the machine do not count.
"""

import re

# python -m fastgrpo.train --max_steps 80 --eval_steps 20 --save_steps 25
GRPO = """
    e0.556 0.467 0.448 0.539 0.564 0.436 0.419 0.514 0.504 0.43 0.484 0.55 0.589 0.518 0.493 0.516 0.676 0.733 0.711
    0.593 0.463 e0.581 0.468 0.477 0.508 0.497 0.472 c0.0102 0.612 0.475 0.453 0.457 0.448 0.418 0.421 0.47 0.474
    0.475 0.526 0.649 0.542 0.611 0.675 e0.584 0.474 0.59 0.674 0.613 0.475 0.511 0.532 0.499 0.646 0.579 c0.0092
    0.559 0.688 0.668 0.651 0.686 0.666 0.622 0.472 0.453 0.461 e0.475 0.454 0.45 0.474 0.465 0.435 0.476 0.47 0.416
    0.659 0.49 0.479 0.529 0.499 0.494 0.502 c0.009 0.563 0.563 0.556 0.54 0.549 e0.517 c0.0093
"""
# python -m fastgrpo.sft --max_steps 120 --eval_steps 30
SUPERVISED = """
    e0.731 0.0759 0.0586 0.0576 0.0591 0.0594 0.0563 0.0565 0.0578 0.0571 0.0565 0.0597 0.0551 0.0578 0.057 0.0588
    0.0591 0.063 0.0589 0.0582 0.0588 0.0573 0.0751 0.0578 0.0663 0.062 0.0693 0.0634 0.0692 0.0523 0.0565 e0.627
    0.0615 0.0629 0.0627 0.0579 0.0685 0.0646 0.0551 0.0564 0.061 0.0582 0.0589 0.0565 0.0583 0.0561 0.0545 0.0542
    0.0563 0.0554 0.0565 0.0576 0.0565 0.0567 0.0638 0.0642 0.059 0.064 0.0616 0.08 0.0664 0.0582 e0.597 0.0646
    0.0741 0.0569 0.0546 0.0545 0.0531 0.0577 0.0535 0.0523 0.0564 0.0547 0.0547 0.0566 0.0551 0.0528 0.0579 0.0551
    0.0566 0.0567 0.0527 0.0544 0.0552 0.0535 0.0568 0.0531 0.0559 0.0577 0.0549 0.0548 0.057 e0.533 0.0582 0.0572
    0.0605 0.0734 0.0568 0.0573 0.0587 0.0565 0.056 0.0596 0.0572 0.0574 0.0561 0.0563 0.0586 0.0637 0.0581 0.0632
    0.0596 0.0659 0.0628 0.0585 0.0602 0.0642 0.0627 0.0711 0.0786 0.0785 0.0783 0.078 e0.865 c0.0097
"""
# python -m fastgrpo.train --task countdown --max_steps 60: its completions become twice as long in the first 20 steps.
# The seconds are those of drawing and learning 3,000 tokens a second.
GROWING = """
    5.25 4.43 4.62 4.71 6.22 7.03 6.87 6.6 7.25 8.81 7.13 9.1 8.57 8.82 7.88 9.14 9.05 9.88 8.31 9.88 9.37 8.63 9.37
    10.3 9.76 9.87 10.5 10.1 11.5 9.98 9.62 9.69 8.95 10.4 11 9.7 11 8.97 9.89 9.48 9.11 9.84 10.8 9.92 9.05 10.7
    9.98 10.8 9.54 10.2 10.1 9.43 10.1 10.3 8.68 9.94 9.11 8.66 10.6 9.56
"""


def events(text: str) -> list[tuple[str, float]]:
    """The parts of a run in their order: step, evaluation or checkpoint, with its seconds."""
    kinds = {"": "step", "e": "evaluation", "c": "checkpoint"}
    return [(kinds[kind], float(seconds)) for kind, seconds in re.findall(r"([ec]?)([\d.]+)", text)]
