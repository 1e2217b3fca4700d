"""Builds the native scheduler with CMake and installs ``sched-pipeline`` with the Python scripts.

Everything else about the package is in pyproject.toml. scikit-build-core's plugin runs CMake and puts
``pipeedge._native`` into the package. A program, unlike a module, has to be passed to setuptools as a
script, both for a wheel and for an editable install.
"""

import subprocess
from pathlib import Path

from scikit_build_core.cmake import CMake
from scikit_build_core.setuptools.build_cmake import BuildCMake
from setuptools import setup

# isort: split
# After setuptools, which provides it.
from distutils.command.build_scripts import build_scripts

PROGRAM = "sched-pipeline"


class BuildNative(BuildCMake):
    """Builds an editable package in a place that stays: ``make test`` runs the native tests that it built.

    A wheel is built elsewhere, for its tools are in an environment of their own, and CMake would begin again.
    """

    def run(self) -> None:
        """Build, an editable package in place of setuptools' own directory, which is temporary."""
        if self.editable_mode:
            self.build_temp = "build/native"
        super().run()


class BuildProgram(build_scripts):
    """Has CMake install the program, because setuptools would expect it in the sources."""

    def run(self) -> None:
        """Build the program and install it to the directory that setuptools takes scripts from."""
        self.run_command("build_cmake")
        built = Path(self.get_finalized_command("build_cmake").build_temp, "_skbuild")
        prefix = built / "program"
        cmake = CMake.default_search().cmake_path
        install = [cmake, "--install", built, "--component", "program", "--prefix", prefix]
        subprocess.run(install, check=True)
        self.mkpath(self.build_dir)
        self.copy_file(str(prefix / "bin" / PROGRAM), str(Path(self.build_dir, PROGRAM)))

    def get_source_files(self) -> list[str]:
        """Return no files, because the program has no source file to distribute."""
        return []


setup(
    cmake_source_dir=".",
    scripts=[PROGRAM],
    cmdclass={"build_cmake": BuildNative, "build_scripts": BuildProgram},
)
