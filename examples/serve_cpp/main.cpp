// Scores one batch with a model that `comera export` wrote: `score MODEL.pt2 BATCH` prints a line for each row, a probability for each
// label. A batch that doesn't fit the model ends with status 2 and one line on standard error.
//
// BATCH holds little-endian numbers in this order: int64 counts of rows B, integer columns I, categorical columns F and values V;
// float32 dense [B, I]; int64 values [V], the ids, column by column; int64 lengths [F, B], how many ids each column has for each row.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

struct Batch {
  int64_t rows, integers, categories, count;  // B, I, F, V
  at::Tensor dense, values, lengths;
};

void require(bool is_met, const std::string& message) {
  if (!is_met) throw std::runtime_error(message);
}

at::Tensor read(std::ifstream& file, std::vector<int64_t> sizes, at::ScalarType type) {
  at::Tensor tensor = at::empty(sizes, type);
  require(bool(file.read(static_cast<char*>(tensor.data_ptr()), std::streamsize(tensor.nbytes()))), "the batch ends early");
  return tensor;
}

Batch read_batch(const char* path) {
  std::ifstream file(path, std::ios::binary);
  Batch batch;
  int64_t* sizes[] = {&batch.rows, &batch.integers, &batch.categories, &batch.count};
  for (int64_t* size : sizes) require(bool(file.read(reinterpret_cast<char*>(size), sizeof *size)), "the batch can't be read");
  double bytes = 4 * sizeof(int64_t);  // in floating point, which doesn't overflow
  bytes += 4.0 * batch.rows * batch.integers + 8.0 * batch.count + 8.0 * batch.categories * batch.rows;
  require(std::all_of(sizes, sizes + 4, [](const int64_t* size) { return *size >= 0; }), "the batch has a size below 0");
  require(bytes == double(std::filesystem::file_size(path)), "the batch has another number of bytes than its sizes say");
  batch.dense = read(file, {batch.rows, batch.integers}, at::kFloat);
  batch.values = read(file, {batch.count}, at::kLong);
  batch.lengths = read(file, {batch.categories * batch.rows}, at::kLong);
  return batch;
}

// Compiled code compares no sizes with its own, and few ids and lengths.
void require_fit(const Batch& batch, const std::unordered_map<std::string, std::string>& metadata) {
  require(metadata.contains("table_rows") && metadata.contains("integer_columns"),
          "the model is not one that `comera export` wrote from a run");
  std::istringstream text(metadata.at("table_rows"));
  const std::vector<int64_t> limits{std::istream_iterator<int64_t>(text), {}};
  require(batch.integers == std::stoll(metadata.at("integer_columns")) && batch.categories == int64_t(limits.size()),
          "the batch has other numbers of columns than the model: " + metadata.at("integer_columns") + " integer and " +
              std::to_string(limits.size()) + " categorical ones");
  const int64_t *value = batch.values.data_ptr<int64_t>(), *end = value + batch.count, *length = batch.lengths.data_ptr<int64_t>();
  for (int64_t column = 0; column < batch.categories; ++column) {
    for (int64_t row = 0; row < batch.rows; ++row, value += *length++) {
      require(*length >= 0 && *length <= end - value, "lengths are below 0 or add up to more than the values");
      for (int64_t i = 0; i < *length; ++i)
        require(value[i] >= 0 && value[i] < limits[column], "id " + std::to_string(value[i]) + " of row " + std::to_string(row) +
                " is out of range in column " + std::to_string(column) + ": it has " + std::to_string(limits[column]) + " ids");
    }
  }
  require(value == end, "lengths add up to fewer than the values");
}

// A model of the form "fast" calls operators of the library beside it, which registers them when it is loaded.
void load_operators(const std::filesystem::path& model) {
  const auto library = std::filesystem::absolute(model).parent_path() / "libcomera_rec.so";
  if (std::filesystem::exists(library) && dlopen(library.c_str(), RTLD_NOW) == nullptr) throw std::runtime_error(dlerror());
}

void score(const char* model, const char* path) {
  Batch batch = read_batch(path);
  load_operators(model);
  torch::inductor::AOTIModelPackageLoader loader(model);
  require_fit(batch, loader.get_metadata());
  const at::Tensor scores = loader.run({batch.dense, batch.values, batch.lengths})[0].contiguous();
  const float* score = scores.data_ptr<float>();
  const int64_t labels = scores.dim() == 2 ? scores.size(1) : 1;
  for (int64_t i = 0; i < scores.numel(); ++i)
    require(!std::isnan(score[i]), "row " + std::to_string(i / labels) + " has no score: one of its numbers is not finite or too large");
  for (int64_t i = 0; i < scores.numel(); ++i) std::printf("%.9g%c", double(score[i]), (i + 1) % labels ? ' ' : '\n');
  require(std::fflush(stdout) == 0 && std::ferror(stdout) == 0, "the scores can't be written to standard output");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return std::fprintf(stderr, "usage: score MODEL.pt2 BATCH\n"), 2;
  try {
    score(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    const std::string message = error.what();  // torch adds a stack trace
    return std::fprintf(stderr, "score: %s\n", message.substr(0, message.find('\n')).c_str()), 2;
  }
}
