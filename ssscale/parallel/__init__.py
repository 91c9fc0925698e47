import warnings

# On import, Megatron-core warns about each optional package that is not installed.
warnings.filterwarnings("ignore", module=r"megatron\.")
