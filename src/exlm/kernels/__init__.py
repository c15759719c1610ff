"""How it is computed: backends that bind weights to kernels when a model loads."""
