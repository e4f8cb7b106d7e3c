"""Operations with a choice of kernels, one for each kind of device, for models to call."""
