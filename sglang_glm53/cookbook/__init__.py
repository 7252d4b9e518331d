"""The cookbook: launch recipes as YAML, held against SGLang's own parser and resolution.

Imports neither torch nor sglang: what needs SGLang runs in a process of its own (resolve.py).
"""
