"""Checks that speak before a weight is loaded: rules as data, held against facts.

`rule.py` says what a rule is, `facts.py` what is known about a deployment, `engine.py` holds one
against the other. The rules stand in one file a subject. Used by `glm53 doctor`, by `glm53 check`,
by `glm53 recipe check` and at the start of a server. Neither torch nor SGLang is imported.
"""
