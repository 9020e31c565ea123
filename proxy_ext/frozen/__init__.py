"""Models beside the policy: called through LiteLLM, recorded with the session, never trained on.

`provider_requests`: the part of a body that reaches a provider. `provider_responses`: its answers.
`call`: one call. `app_call`: one through LiteLLM's app. `route_call`: one at its other routes.
`spend_caps`: caps on cost. `frozen_models`: all of it together. LiteLLM itself is behind
`proxy_ext.litellm_shim` and `proxy_ext.litellm_proxy`.
"""
