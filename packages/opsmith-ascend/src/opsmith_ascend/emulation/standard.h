// What the emulation takes of C++'s own library. Each kernel's unit begins with it, so that it can be precompiled, as the
// tests do: parsing it is a third of what a unit takes there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
