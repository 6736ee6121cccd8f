"""SGLang's /generate over the gateway's own types."""
