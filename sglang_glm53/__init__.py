"""sglang-glm53: GLM-5.3 (`GlmMoeDsaForCausalLM`) served by SGLang through our own model code.

Importing this package does nothing: the work is in the two entry points, `plugin.register`
(group `sglang.srt.plugins`) and `host.activate` (group `sglang.srt.platforms`).
"""

__version__ = "0.1.0"
