"""Proof on a GPU that our classes compute what SGLang's and transformers' do, at GLM-5.3's sizes.

Each module is a program of its own (`python -m gpu.parity`, from `tests/`), so that the measurement
needs no pytest; the `test_*.py` files run the same programs and judge their results.
"""
