"""Which folders become which packages of the wheel. Everything else stands in pyproject.toml.

The wheel holds the libraries. launch/, eval/ and slurm/ are commands of a checkout.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["ssscale*", "data_prep*"]),
        "ssscale.configs",
        "ssscale_kernels",
        *(f"ssscale_kernels.{name}" for name in find_packages("kernels")),
    ],
    package_dir={"ssscale_kernels": "kernels", "ssscale.configs": "configs"},
    package_data={"ssscale.configs": ["**/*.yaml"]},
)
