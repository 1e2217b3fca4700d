"""Builds the native scheduler with CMake and installs ``sched-pipeline`` with the Python scripts.

Everything else about the package is in pyproject.toml. scikit-build-core's plugin runs CMake and puts
``pipeedge._native`` into the package. A program, unlike a module, has to be passed to setuptools as a
script, both for a wheel and for an editable install.
"""

from pathlib import Path

from scikit_build_core.setuptools.build_cmake import BuildCMake
from setuptools import setup

# isort: split
# After setuptools, which provides it.
from distutils.command.build_scripts import build_scripts

PROGRAM = "sched-pipeline"


class BuildNative(BuildCMake):
    """Builds in a place that stays: ``make test`` runs the native tests that ``make setup`` built."""

    def finalize_options(self) -> None:
        """Replace setuptools' own place, which is temporary for an editable package."""
        super().finalize_options()
        self.build_temp = "build/native"


class BuildProgram(build_scripts):
    """Copies the program from CMake's build tree, because setuptools would expect it in the sources."""

    def run(self) -> None:
        """Build the program and copy it to the directory from which scripts are installed."""
        self.run_command("build_cmake")
        built = Path(self.get_finalized_command("build_cmake").build_temp, "_skbuild", "bin", PROGRAM)
        self.mkpath(self.build_dir)
        target = Path(self.build_dir, PROGRAM)
        self.copy_file(str(built), str(target), preserve_mode=False)
        target.chmod(0o755)

    def get_source_files(self) -> list[str]:
        """Return no files, because the program has no source file to distribute."""
        return []


setup(
    cmake_source_dir=".",
    scripts=[PROGRAM],
    cmdclass={"build_cmake": BuildNative, "build_scripts": BuildProgram},
)
