"""DeepSeek's multi-head latent attention."""
