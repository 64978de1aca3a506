// Runs kernels for a process on another processor: calls come in on standard input, what they wrote goes out.
//
// The libraries are those that PyTorch would load, bindings included. Of PyTorch they call little until a tensor of its own
// comes, and none does: what they call is below. All numbers of a message have 8 bytes.
//
//   call    name | storages: bytes, is it written, content | tensors: storage, offset, dtype, dims, sizes, strides
//           | arguments: kind, number
//   answer  0, the storages that are written | what is wrong, as a text
//
// A storage ends where memory does, to a cache line, and begins behind bytes that nobody may write: an access outside is
// noticed here that PyTorch's own memory would bear with.
#include <dlfcn.h>
#include <sys/mman.h>
#include <torch/csrc/stable/c/shim.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "binding_tensor.h"

namespace {

constexpr uint32_t kThreads = 2;
constexpr int64_t kLine = 64, kPage = 4096;
constexpr unsigned char kMark = 0xa5;

using Direct = void (*)(const uint64_t*);

template <class T>
void receive(T* to, int64_t count) {
  if (count && std::fread(to, sizeof(T), size_t(count), stdin) != size_t(count)) std::exit(0);
}

int64_t number() {
  int64_t n;
  receive(&n, 1);
  return n;
}

void send(const void* from, int64_t bytes) { std::fwrite(from, 1, size_t(bytes), stdout); }

void send(int64_t n) { send(&n, sizeof n); }

class Storage {
 public:
  Storage() : bytes_(number()), written_(number() != 0) {
    room_ = (bytes_ + kLine - 1) / kLine * kLine;
    mapped_ = (kLine + room_ + kPage - 1) / kPage * kPage;
    void* const at = mmap(nullptr, size_t(mapped_ + kPage), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) std::abort();
    base_ = static_cast<unsigned char*>(at);
    if (mprotect(base_ + mapped_, kPage, PROT_NONE) != 0) std::abort();
    std::memset(base_, kMark, size_t(mapped_));
    receive(data(), bytes_);
    if (!written_) before_.assign(data(), data() + bytes_);
  }
  Storage(const Storage&) = delete;
  Storage(Storage&& other) = delete;
  ~Storage() { munmap(base_, size_t(mapped_ + kPage)); }

  unsigned char* data() const { return base_ + mapped_ - room_; }
  bool written() const { return written_; }
  void answer() const { send(data(), bytes_); }

  void check(size_t number) const {
    const auto marked = [](unsigned char byte) { return byte == kMark; };
    if (!std::all_of(base_, data(), marked) || !std::all_of(data() + bytes_, base_ + mapped_, marked))
      throw std::runtime_error("the kernel wrote outside storage " + std::to_string(number));
    if (!written_ && !std::equal(before_.begin(), before_.end(), data()))
      throw std::runtime_error("the kernel wrote into storage " + std::to_string(number) +
                               ", which is only read");
  }

 private:
  int64_t bytes_, room_, mapped_;
  bool written_;
  unsigned char* base_;
  std::vector<unsigned char> before_;
};

struct Argument {
  std::vector<int64_t> sizes, strides;
  opsmith::Tensor tensor;
};

enum Kind : int64_t { plain, tensor, optional_number };

Direct kernel_of(const std::vector<void*>& libraries, const std::string& name) {
  for (void* library : libraries) {
    const auto find = reinterpret_cast<Direct (*)(const char*)>(dlsym(library, "opsmith_kernel"));
    if (Direct found = find ? find(name.c_str()) : nullptr) return found;
  }
  throw std::runtime_error("no library has the kernel " + name);
}

void serve(const std::vector<void*>& libraries) {
  std::string name(size_t(number()), ' ');
  receive(name.data(), int64_t(name.size()));
  std::vector<std::unique_ptr<Storage>> storages(static_cast<size_t>(number()));
  for (auto& storage : storages) storage.reset(new Storage);
  std::vector<Argument> tensors(static_cast<size_t>(number()));
  for (Argument& one : tensors) {
    const int64_t storage = number(), offset = number(), type = number(), dims = number();
    one.sizes.reserve(1), one.strides.reserve(1);  // no null pointers, which stand for what is not given
    one.sizes.resize(size_t(dims)), one.strides.resize(size_t(dims));
    receive(one.sizes.data(), dims), receive(one.strides.data(), dims);
    one.tensor = {storages[size_t(storage)]->data() + offset,
                  one.sizes.data(),
                  one.strides.data(),
                  dims,
                  torch::headeronly::ScalarType(type),
                  torch::headeronly::DeviceType::CPU,
                  -1};
  }
  std::vector<int64_t> numbers(static_cast<size_t>(number()));
  std::vector<uint64_t> values(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const int64_t kind = number();
    numbers[i] = number();
    values[i] = kind == tensor            ? reinterpret_cast<uint64_t>(&tensors[size_t(numbers[i])].tensor)
                : kind == optional_number ? reinterpret_cast<uint64_t>(&numbers[i])
                                          : uint64_t(numbers[i]);
  }
  std::string wrong;
  try {
    kernel_of(libraries, name)(values.data());
    for (size_t i = 0; i < storages.size(); ++i) storages[i]->check(i);
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  send(int64_t(wrong.size()));
  send(wrong.data(), int64_t(wrong.size()));
  for (const auto& storage : storages) {
    if (wrong.empty() && storage->written()) storage->answer();
  }
  std::fflush(stdout);
}

}  // namespace

// What libraries ask of PyTorch when they are loaded, and its threads: two, so that loops are divided.
extern "C" {
uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                            TorchLibraryHandle* library) {
  *library = nullptr;
  return 0;
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return 0; }
AOTITorchError torch_library_impl(TorchLibraryHandle, const char*,
                                  void (*)(StableIValue*, uint64_t, uint64_t), uint64_t) {
  return 0;
}
AOTITorchError torch_get_num_threads(uint32_t* count) {
  *count = kThreads;
  return 0;
}
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain, ParallelFunc body,
                                  void* context) {
  static thread_local bool inside = false;
  const int64_t share = inside ? end - begin
                               : std::max(grain, (end - begin + kThreads - 1) / int64_t(kThreads));
  const int64_t middle = std::min(end, begin + share);
  std::exception_ptr raised;
  std::thread other;
  if (middle < end) {
    other = std::thread([&] {
      inside = true;
      try {
        body(middle, end, context);
      } catch (...) {
        raised = std::current_exception();
      }
    });
  }
  const bool outer = inside;
  inside = true;
  body(begin, middle, context);
  inside = outer;
  if (other.joinable()) other.join();
  if (raised) std::rethrow_exception(raised);
  return 0;
}
}

int main(int count, char** paths) {
  std::vector<void*> libraries;
  for (int i = 1; i < count; ++i) {
    void* const library = dlopen(paths[i], RTLD_LAZY);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    libraries.push_back(library);
  }
  for (;;) serve(libraries);
}
