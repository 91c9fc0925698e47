import warnings

# Imported, Megatron-core names the optional packages that it does without.
warnings.filterwarnings("ignore", module=r"megatron\.")
