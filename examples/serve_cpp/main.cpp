// Scores one batch with a model that `comera export` wrote: `score MODEL.pt2 BATCH` prints one probability per line.
//
// BATCH holds little-endian numbers in this order: int64 counts of rows B, integer columns I, categorical columns F and values V;
// float32 dense [B, I]; int64 values [V], the ids, column by column; int64 lengths [F, B], how many ids each column has for each row.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

at::Tensor read(std::ifstream& file, std::vector<int64_t> sizes, at::ScalarType type) {
  at::Tensor tensor = at::empty(sizes, type);
  if (!file.read(static_cast<char*>(tensor.data_ptr()), std::streamsize(tensor.nbytes()))) throw std::runtime_error("the batch ends early");
  return tensor;
}

// A model of the form "fast" calls operators of the library beside it, which registers them when it is loaded.
void load_operators(const std::filesystem::path& model) {
  const auto library = std::filesystem::absolute(model).parent_path() / "libcomera_rec.so";
  if (std::filesystem::exists(library) && dlopen(library.c_str(), RTLD_NOW) == nullptr) throw std::runtime_error(dlerror());
}

void score(const char* model, const char* batch) {
  load_operators(model);
  torch::inductor::AOTIModelPackageLoader loader(model);
  std::ifstream file(batch, std::ios::binary);
  int64_t sizes[4];  // B, I, F, V
  if (!file.read(reinterpret_cast<char*>(sizes), sizeof sizes)) throw std::runtime_error("the batch can't be read");
  const auto [rows, integers, categories, count] = sizes;
  const at::Tensor dense = read(file, {rows, integers}, at::kFloat);
  const at::Tensor values = read(file, {count}, at::kLong), lengths = read(file, {categories * rows}, at::kLong);
  const at::Tensor scores = loader.run({dense, values, lengths})[0];
  for (int64_t row = 0; row < rows; ++row) std::printf("%.9g\n", double(scores.data_ptr<float>()[row]));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return std::fprintf(stderr, "usage: score MODEL.pt2 BATCH\n"), 2;
  try {
    score(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "score: %s\n", error.what()), 2;
  }
}
