# What stubgen cannot see: the types inside module constants.
\.SAMPLER_NAMES$:
    SAMPLER_NAMES: list[str]

\.KV_TYPES$:
    KV_TYPES: list[str]
