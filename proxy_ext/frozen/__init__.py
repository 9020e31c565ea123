"""Models beside the policy: called through LiteLLM, recorded with the session, never trained on.

`requests` what of a body reaches a provider · `answers` what comes back · `call` one call ·
`spend` caps · `streams` what LiteLLM makes of a provider's · `frozen` all of it together · `names`
which model a name means. Only `proxy_ext.litellm_shim` knows LiteLLM; the others know the
:class:`Provider` of `provider`.
"""
