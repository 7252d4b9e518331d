"""Reference numerics: what GLM-5.3 must compute, taken from transformers."""
