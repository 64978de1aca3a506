// The header by which a kernel asks for Ascend C. Where CANN is installed, its own of this name is found instead.
#pragma once
#include "ascend_emulation.h"
