"""A run folder -> what a person can look at: curves.png, summary.json, a table. `python -m fastgrpo.report RUN`."""

import sys

from fastgrpo.run.curves import draw_curves

if __name__ == "__main__":
    print(draw_curves(sys.argv[1]))
