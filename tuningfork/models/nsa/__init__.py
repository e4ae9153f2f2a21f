"""Models with native sparse attention, as classes of transformers; importing this makes its Auto classes know them."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tuningfork.models.nsa.configuration_nsa import NsaConfig
from tuningfork.models.nsa.modeling_nsa import NsaForCausalLM, NsaModel

__all__ = ["NsaConfig", "NsaForCausalLM", "NsaModel"]

AutoConfig.register(NsaConfig.model_type, NsaConfig, exist_ok=True)
AutoModel.register(NsaConfig, NsaModel, exist_ok=True)
AutoModelForCausalLM.register(NsaConfig, NsaForCausalLM, exist_ok=True)
