"""AdaFlash: a high-concurrency LLM inference server with adaptive block-diffusion speculation."""

__version__ = "0.1.0"
