// What a node of autograd is told of a kernel's backward, and what it keeps of a call: binding_nodes.cpp.
#pragma once

#include "direct.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace opsmith {

// Where an argument of the backward comes from; `of` is an argument of the forward.
enum class From : char {
  gradient = 'g',  // of the result `of`
  saved = 's',  // the tensor `of`, or `instead` where that is not there
  number = 'n',  // `of`
  constant = 'c',
  made = 'm',  // a gradient like `of`, where it is wanted
  always = 'a',  // the same, made wherever `of` is there
};

struct Argument {
  From from;
  char type;
  int of, instead;
  Value constant;
};

struct Gradient {
  int of;  // an input of the forward
  int argument;  // of the backward, which is its gradient
};

// A result that nobody but the backward reads, float32: r for each row, p a pair of such vectors, e two in each row.
struct Kept {
  int place;
  char shape;
};

// A number that the forward must have been given.
struct Required {
  int place;
  Value value;
};

struct Plan {
  c10::OperatorHandle op;
  Direct direct;
  std::string name, types, from;  // the last two a letter for each argument
  std::vector<Argument> arguments;
  std::vector<Gradient> gradients;
  std::vector<Kept> kept;
  std::vector<Required> required;
  bool strided;  // whether the backward takes any tensor whose last dimension is contiguous
};

// What a tensor is made like.
struct Like {
  c10::SmallVector<int64_t, 4> sizes;
  Strides strides;  // none where it is contiguous
  at::ScalarType dtype;

  Like(const c10::TensorImpl* t, bool strided)
      : sizes(t->sizes().begin(), t->sizes().end()), dtype(c10::typeMetaToScalarType(t->dtype())) {
    if (strided && !t->is_contiguous()) strides = layout_of(t);
  }
};

// What a node keeps for an argument, beside saved tensors: a number, or which gradient arrives for it; and which of `likes` it is like.
struct Held {
  Value number = 0;
  bool there = false;
  int like = -1;
};

// Of all arguments. A node stays below 1 KB: for larger pieces of memory glibc first puts all small ones that are free in order.
struct AllHeld {
  c10::SmallVector<Held, 12> arguments;
  c10::SmallVector<Like, 2> likes;

  void like(Held& held, const c10::TensorImpl* t, bool strided) {
    held.like = int(likes.size());
    likes.emplace_back(t, strided);
  }
};

}  // namespace opsmith
