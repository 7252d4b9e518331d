"""Patches of SGLang's source (patches/patches.yaml), applied and reverted exactly."""
