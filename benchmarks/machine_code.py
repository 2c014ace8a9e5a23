"""The cost of a kernel's machine code: registers, memory, and instructions along the paths of a warp.

Paths are shortest paths in the control flow of the disassembly. The inner loop is the shortest cycle through the last
matrix instruction. The epilogue is the shortest path from there to the first store, and then back to the loop if a
program computes several tiles, or else to the end. Rare branches are thus ignored.

`make machine-code` measures every compilation of tests/kernels/test_aot.py, and rewrites the table of the installed
Triton in TABLE.
"""

import json
import re
from collections import deque
from dataclasses import asdict, dataclass
from functools import cache

import triton

from benchmarks.compare import RESULTS

TABLE = RESULTS / "machine_code.json"
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.M)
MATRIX = re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\b")
STORE = re.compile(r"\b(STG|UTMASTG|ST)\b")
BRANCH = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
ALWAYS = re.compile(r"^(BRA(\.\w+)* 0x|EXIT)")  # unconditional


@dataclass(frozen=True)
class Budget:
    """The cost of one compilation."""

    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes per program
    instructions: int
    loop: int | None  # instructions of a warp per iteration of the product loop, or None without a loop
    epilogue: int | None  # instructions of a warp between the last product of a tile and the first of the next
    matrix: int | None  # matrix instructions of a warp per iteration of the loop

    def far_from(self, other):
        """Return a text with the numbers that differ by more than 5%, or None."""
        mine, theirs = asdict(self), asdict(other)
        far = [
            f"{name} {theirs[name]} -> {mine[name]}"
            for name in mine
            if (mine[name] is None) != (theirs[name] is None)
            or abs((mine[name] or 0) - (theirs[name] or 0)) > 0.05 * (theirs[name] or 0)
        ]
        return ", ".join(far) or None


@cache
def budgets():
    """Return the committed budgets of the installed Triton by the name of the compilation; empty without a table."""
    rows = json.loads(TABLE.read_text()).get(triton.__version__, {})
    return {name: Budget(**row) for name, row in rows.items()}


def write_budgets(found):
    """Write budgets by name as the table of the installed Triton, one per line."""
    tables = json.loads(TABLE.read_text()) | {triton.__version__: {name: asdict(each) for name, each in found.items()}}
    texts = []
    for version, rows in sorted(tables.items()):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
        texts.append(f'"{version}": {{\n{lines}\n}}')
    TABLE.write_text("{" + ",\n".join(texts) + "}\n")


def measure(registers, stack, shared, disassembly):
    """Return the budget of a kernel from its resource usage and cuobjdump's disassembly."""
    code = [(int(address, 16), text) for address, text in INSTRUCTION.findall(disassembly)]
    count = sum(text != "NOP" for _, text in code)
    return Budget(registers, stack, shared, count, *_ways(code))


def _ways(code):
    """Return (loop, epilogue, matrix) of a list of (address, instruction)."""
    products = [i for i, (_, text) in enumerate(code) if MATRIX.search(text)]
    if not products:
        return None, None, None
    after, last = _successors(code), products[-1]
    steps, before = _search(after, last)
    loop, matrix = steps.get(last), len(products)
    if loop:
        matrix, i = 1, before[last]
        while i != last:
            matrix, i = matrix + (i in products), before[i]
    stores = [i for i in steps if STORE.search(code[i][1])]
    if not stores:
        return loop, None, matrix
    store = min(stores, key=steps.get)
    rest, _ = _search(after, store)
    if last in rest and loop:
        return loop, steps[store] + rest[last] - loop, matrix
    return loop, steps[store] + min(rest[i] for i in rest if code[i][1].startswith("EXIT")), matrix


def _successors(code):
    """Return the indices of the possible next instructions of each instruction."""
    number, after = {address: i for i, (address, _) in enumerate(code)}, []
    for i, (_, text) in enumerate(code):
        branch, to = BRANCH.search(text), []
        if branch:
            to.append(number[int(branch[1], 16)])
        if not ALWAYS.match(text) and i + 1 < len(code):
            to.append(i + 1)
        after.append(to)
    return after


def _search(after, start):
    """Return the shortest distance from the start to each reachable instruction, and its predecessor on that path."""
    steps, before, queue = {}, {}, deque([start])
    while queue:
        i = queue.popleft()
        for j in after[i]:
            if j not in steps:
                steps[j], before[j] = (1 if i == start else steps[i] + 1), i
                queue.append(j)
    return steps, before
