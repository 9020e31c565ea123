"""Models beside the policy: called through LiteLLM, recorded with the session, never trained on.

`provider_requests`: the part of a body that reaches a provider. `provider_responses`: its answers.
`call`: one call. `spend_caps`: caps on cost. `frozen_models`: all of it together. Only
`proxy_ext.litellm_shim` knows LiteLLM.
"""
