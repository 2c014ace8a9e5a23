"""Steps of a completion, and where they end in its text."""


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """Split a completion into steps. What is empty between two separators is no step.

    Args:
        text: The completion.
        separator: What stands between two steps.

    Returns:
        (the step without the white space around it, the number of characters up to the end of its separator) pairs.
    """
    steps, end = [], 0
    for part in text.split(separator):
        end = min(end + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((part.strip(), end))
    return steps
