"""What a device comes to with each kind of layer of its job, and by which kernels, before it takes part."""
