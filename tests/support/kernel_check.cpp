// A program that checks the kernels against plain scalar code, for processors on which the Python tests cannot run.
// It exits with status 1 after the first check that fails, and prints which one.
//
// It is compiled with the flags of a build, over the same headers as the library.
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <random>
#include <string>

#include "ops.cpp"
#include "treadle.cpp"

namespace {

using std::vector;

std::mt19937 rng(1);
int checks = 0;

int uniform(int low, int high) { return low + int(rng() % uint32_t(high - low + 1)); }
float normal() {  // nearly
  float sum = 0.0f;
  for (int i = 0; i < 12; ++i) sum += float(rng() & 0xffff) / 65536.0f;
  return sum - 6.0f;
}
vector<float> normals(size_t count, float scale = 1.0f) {
  vector<float> values(count);
  for (float& x : values) x = normal() * scale;
  return values;
}

// Ends the program with a message unless `good`.
__attribute__((format(printf, 2, 3))) void check(bool good, const char* format, ...) {
  ++checks;
  if (good) return;
  va_list arguments;
  va_start(arguments, format);
  std::printf("FAILED: ");
  std::vprintf(format, arguments);
  std::printf("\n");
  std::exit(1);
}

// what: returns a description, and is called only for a check that fails.
template <class What>
void check_close(double ours, double theirs, double tolerance, const What& what) {
  ++checks;
  if (std::fabs(ours - theirs) <= tolerance) return;
  check(false, "%s: %.9g instead of %.9g ± %.2g", std::string(what()).c_str(), ours, theirs, tolerance);
}

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...) {
  char line[200];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return line;
}

// Scalar code

double half_of(const uint8_t* p) {
  const int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return bits >> 15 ? -magnitude : magnitude;
}

// Rounded to the 8 significant bits of bfloat16, ties to even.
double bf16_of(double x) {
  int exponent;
  const double fraction = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(fraction * 256), exponent - 8);
}

// Integers and their scale: x ≈ q × scale.
struct Quantized {
  vector<int> q;
  double scale;
};
Quantized quantize(const float* x, int n) {
  float top = 0.0f;
  for (int i = 0; i < n; ++i) top = std::max(top, std::fabs(x[i]));
  const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
  Quantized out{{}, double(top / 127.0f)};
  for (int i = 0; i < n; ++i) out.q.push_back(int(std::nearbyint(x[i] * inverse)));
  return out;
}

constexpr Format FORMATS[] = {BF16, INT8, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
const char* name_of(Format format) {
  const char* names[] = {"BF16", "INT8", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"};
  return names[format];
}
bool is_k(Format format) { return format == Q4_K || format == Q5_K || format == Q6_K; }
int columns_of_block(Format format) { return is_k(format) ? 256 : format >= Q4_0 ? 32 : 1; }
int bytes_of_block(Format format) {
  const int bytes[] = {4, 4, 18, 20, 144, 22, 24, 176, 210, 34};
  return bytes[format];
}

// Weight `i` of a block, as ggml defines it.
double weight_of(Format format, const uint8_t* p, int i) {
  const double d = half_of(p);
  const auto nibble = [&](const uint8_t* q) { return i % 32 < 16 ? q[i % 16] & 15 : q[i % 16] >> 4; };
  const auto fifth = [&](const uint8_t* q) { return q[i / 8] >> i % 8 & 1; };
  switch (format) {
    case Q4_0: return d * (nibble(p + 2) - 8);
    case Q4_1: return d * nibble(p + 4) + half_of(p + 2);
    case Q5_0: return d * ((nibble(p + 6) | fifth(p + 2) << 4) - 16);
    case Q5_1: return d * (nibble(p + 8) | fifth(p + 4) << 4) + half_of(p + 2);
    case Q8_0: return d * int8_t(p[2 + i]);
    case Q4_K:
    case Q5_K: {
      const int group = i / 32, low = group % 4;
      const uint8_t* scales = p + 4;
      int scale = scales[low] & 63, minimum = scales[low + 4] & 63;
      if (group >= 4) {
        scale = (scales[low + 8] & 15) | (scales[low] >> 6) << 4;
        minimum = scales[low + 8] >> 4 | (scales[low + 4] >> 6) << 4;
      }
      const uint8_t byte = p[(format == Q4_K ? 16 : 48) + group / 2 * 32 + i % 32];
      int q = group % 2 ? byte >> 4 : byte & 15;
      if (format == Q5_K) q |= (p[16 + i % 32] >> group & 1) << 4;
      return d * scale * q - half_of(p + 2) * minimum;
    }
    case Q6_K: {
      const int half = i / 128, quarter = i % 128 / 32;
      const uint8_t byte = p[half * 64 + quarter % 2 * 32 + i % 32];
      const int high = p[128 + half * 32 + i % 32] >> 2 * quarter & 3;
      const int q = (quarter < 2 ? byte & 15 : byte >> 4) | high << 4;
      return half_of(p + 208) * int8_t(p[192 + i / 16]) * (q - 32);
    }
    default: std::abort();
  }
}

// A random matrix, packed, and the values for which it stands.
struct Matrix {
  Format format;
  int rows, columns;
  vector<double> values;  // [rows, columns]
  vector<char> data;
  vector<float> bias;
  Weights weights;

  // integers: scales are small integers, and so are all values.
  Matrix(Format format, int rows, int columns, bool integers = false, bool has_bias = false)
      : format(format), rows(rows), columns(columns) {
    const int width = columns_of_block(format), size = bytes_of_block(format);
    vector<uint8_t> source(size_t(rows) * columns / width * size);
    for (auto& byte : source) byte = uint8_t(rng());
    for (size_t at = 0; at < source.size(); at += size) fill(source.data() + at, integers);
    if (format == INT8 && integers)
      for (int r = 0; r < rows; ++r) store_float(source.data() + size_t(r) * columns * 4, 127.0f);
    for (int r = 0; r < rows; ++r) {
      const uint8_t* row = source.data() + size_t(r) * columns / width * size;
      const float* floats = reinterpret_cast<const float*>(row);
      if (format == INT8) {
        const Quantized x = quantize(floats, columns);
        for (int q : x.q) values.push_back(q * x.scale);
      } else {
        for (int c = 0; c < columns; ++c)
          values.push_back(format == BF16 ? bf16_of(floats[c])
                                          : weight_of(format, row + c / width * size, c % width));
      }
    }
    data.resize(treadle_matrix_bytes(format, rows, columns) + 64);
    char* aligned = data.data() + (64 - reinterpret_cast<uintptr_t>(data.data()) % 64) % 64;
    const int64_t bad = treadle_pack(format, source.data(), rows, columns, aligned, uniform(1, 3));
    check(bad == 0, "%s: %" PRId64 " groups are not finite", name_of(format), bad);
    weights = {aligned, nullptr, int32_t(round_up(rows, PANEL)), int32_t(round_up(columns, GROUP)), format};
    if (has_bias) {
      bias = normals(weights.n);
      weights.bias = bias.data();
    }
  }
  Matrix(const Matrix&) = delete;

  static void store_float(uint8_t* p, float x) { std::memcpy(p, &x, 4); }
  void fill(uint8_t* p, bool integers) const {
    if (format == BF16 || format == INT8)
      return store_float(p, integers ? float(uniform(-127, 127)) : normal() * 0.1f);
    const auto half = [&](uint8_t* at) {
      // 1, or about 2^-7 of either sign.
      const uint16_t bits = integers ? 0x3c00 : uint16_t((rng() & 0x83ff) | 0x2000);
      std::memcpy(at, &bits, 2);
    };
    if (format == Q6_K) {
      half(p + 208);
      if (integers)
        for (int i = 0; i < 16; ++i) p[192 + i] = uint8_t(uniform(-3, 3));
      return;
    }
    half(p);
    if (format == Q4_1 || format == Q5_1 || is_k(format)) half(p + 2);
    if (is_k(format) && integers)  // scales and minima of up to 3, or 19 in groups 4 to 7
      for (int i = 0; i < 12; ++i) p[4 + i] &= i < 8 ? 0x43 : 0x33;
  }

  int group() const { return format == INT8 ? GROUP : BLOCK_GROUP; }
};

// x [rows, columns] as a matrix of `format` multiplies it.
vector<double> narrowed(const Matrix& m, const vector<float>& x, int rows) {
  vector<double> out;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < m.columns; c += m.group()) {
      const float* from = x.data() + size_t(r) * m.columns + c;
      const int count = std::min(m.group(), m.columns - c);
      const Quantized group = quantize(from, count);
      for (int i = 0; i < count; ++i)
        out.push_back(m.format != BF16 ? group.q[i] * group.scale : sizeof(act) == 2 ? bf16_of(from[i]) : from[i]);
    }
  return out;
}

struct Sum {
  double value, magnitude;
};
Sum product(const Matrix& m, const double* x, int output) {
  Sum sum{m.bias.empty() ? 0.0 : m.bias[output], 0.0};
  for (int i = 0; i < m.columns; ++i) {
    const double term = x[i] * m.values[size_t(output) * m.columns + i];
    sum.value += term;
    sum.magnitude += std::fabs(term);
  }
  return sum;
}

vector<float> linear(const Matrix& m, const vector<float>& x, int rows, int threads) {
  vector<float> out(size_t(rows) * m.weights.n, NAN);
  treadle_op_linear(&m.weights, x.data(), rows, m.columns, out.data(), threads);
  return out;
}

int random_columns(Format format) {
  return is_k(format) ? 256 * uniform(1, 2) : format >= Q4_0 ? 32 * uniform(1, 12) : uniform(1, 400);
}

// Checks

void exp2_is_accurate() {
  for (int i = 0; i < 4000; ++i) {
    alignas(64) float x[W];
    for (float& value : x) value = i == 0 ? 0.0f : float(uniform(-126000, 127000)) / 1000.0f;
    vector<float> ours(W);
    store(ours.data(), treadle::exp2(load(x)));
    for (int j = 0; j < W; ++j) {
      const double exact = std::exp2(double(x[j]));
      check_close(ours[j], exact, i == 0 ? 0.0 : 3e-7 * exact, [] { return "exp2"; });
    }
  }
}

void rows_unpack_to_the_values_of_the_file(Format format) {
  const Matrix m(format, uniform(1, 70), random_columns(format));
  vector<float> row(m.weights.k);
  for (int r = 0; r < m.rows; ++r) {
    treadle_op_unpack_row(&m.weights, r, row.data());
    for (int c = 0; c < m.columns; ++c)
      check_close(row[c], m.values[size_t(r) * m.columns + c], 2e-7 * std::fabs(row[c]) + 1e-9,
                  [&] { return text("%s, row %d, column %d", name_of(format), r, c); });
  }
}

void products_of_integers_are_exact(Format format) {
  const Matrix m(format, uniform(1, 70), random_columns(format), true);
  const int rows = uniform(1, 15);
  vector<float> x(size_t(rows) * m.columns);
  for (float& value : x) value = float(uniform(-127, 127));
  for (int r = 0; r < rows; ++r)  // makes the scale of each group 1
    for (int c = 0; c < m.columns; c += m.group()) x[size_t(r) * m.columns + c] = r % 2 ? 127.0f : -127.0f;
  const vector<float> out = linear(m, x, rows, uniform(1, 3));
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < m.rows; ++n) {
      int64_t sum = 0;
      for (int c = 0; c < m.columns; ++c)
        sum += int64_t(x[size_t(r) * m.columns + c]) * int64_t(m.values[size_t(n) * m.columns + c]);
      check_close(out[size_t(r) * m.weights.n + n], double(sum), 0.0,
                  [&] { return text("%s [%d, %d], row %d, output %d", name_of(format), m.rows, m.columns, r, n); });
    }
}

void products_are_close_and_do_not_depend_on_the_batch(Format format) {
  const Matrix m(format, uniform(1, 100), random_columns(format), false, uniform(0, 1));
  const int rows = uniform(1, 20);
  const vector<float> x = normals(size_t(rows) * m.columns);
  const vector<double> exact = narrowed(m, x, rows);
  const vector<float> out = linear(m, x, rows, 1);
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < m.rows; ++n) {
      const Sum sum = product(m, exact.data() + size_t(r) * m.columns, n);
      check_close(out[size_t(r) * m.weights.n + n], sum.value, 2e-6 * sum.magnitude + 1e-6,
                  [&] { return text("%s [%d, %d], row %d, output %d", name_of(format), m.rows, m.columns, r, n); });
    }
    const vector<float> alone = linear(m, {x.begin() + r * m.columns, x.begin() + (r + 1) * m.columns}, 1, 1);
    check(!std::memcmp(alone.data(), out.data() + size_t(r) * m.weights.n, m.rows * 4), "%s: row %d alone differs",
          name_of(format), r);
  }
  const vector<float> threaded = linear(m, x, rows, 3);
  check(!std::memcmp(threaded.data(), out.data(), out.size() * 4), "%s: three threads differ", name_of(format));
}

void gated_products_are_close(Format format) {
  const int inputs = random_columns(format), outputs = uniform(1, 70), rows = uniform(1, 15);
  const Matrix gate(format, outputs, inputs), up(format, outputs, inputs);
  const vector<float> x = normals(size_t(rows) * inputs);
  const vector<double> exact = narrowed(gate, x, rows);
  vector<float> out(size_t(rows) * gate.weights.n);
  treadle_op_linear_silu_mul(&gate.weights, &up.weights, x.data(), rows, inputs, out.data(), 2);
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < outputs; ++n) {
      const Sum g = product(gate, exact.data() + size_t(r) * inputs, n);
      const Sum u = product(up, exact.data() + size_t(r) * inputs, n);
      const double silu = g.value / (1 + std::exp(-g.value));
      const double error = 4e-6 * (g.magnitude * std::fabs(u.value) + u.magnitude * std::fabs(silu));
      check_close(out[size_t(r) * gate.weights.n + n], silu * u.value, error + 1e-6,
                  [&] { return text("gated %s, row %d, output %d", name_of(format), r, n); });
    }
}

double inverse_rms_of(const float* x, int n, double eps) {
  double squares = 0.0;
  for (int i = 0; i < n; ++i) squares += double(x[i]) * x[i];
  return 1 / std::sqrt(squares / n + eps);
}

void norms_are_close() {
  for (int32_t narrowing : {NARROW_BF16, NARROW_INT8, NARROW_BLOCKS}) {
    const int n = uniform(1, 300), group = narrowing == NARROW_INT8 ? GROUP : BLOCK_GROUP;
    const vector<float> x = normals(n, 3.0f), weight = normals(n);
    const double scale = inverse_rms_of(x.data(), n, 1e-5f);
    vector<float> out(n);
    treadle_op_rms_norm(x.data(), weight.data(), n, 1e-5f, narrowing, out.data());
    for (int first = 0; first < n; first += group) {
      double top = 0.0;
      const int end = std::min(first + group, n);
      for (int i = first; i < end; ++i) top = std::max(top, std::fabs(x[i] * scale * weight[i]));
      for (int i = first; i < end; ++i) {
        const double exact = x[i] * scale * weight[i];
        const double step = narrowing != NARROW_BF16 ? top / 127 : sizeof(act) == 2 ? std::fabs(exact) / 128 : 0.0;
        check_close(out[i], exact, 0.5001 * step + 1e-6 * std::fabs(exact),
                    [&] { return text("norm of %d, column %d", n, i); });
      }
    }
  }
}

void rotations_are_close() {
  for (int D : {32, 64, 80, 96, 128, 256})
    for (bool is_normalized : {false, true}) {
      const int heads = uniform(1, 4), half = D / 2;
      const vector<float> in = normals(size_t(heads) * D), weight = normals(D);
      vector<float> cosines, sines, out(in.size());
      for (int i = 0; i < half; ++i) {
        const float angle = normal() * 3;
        cosines.push_back(std::cos(angle));
        sines.push_back(std::sin(angle));
      }
      treadle_op_rotary(in.data(), heads, D, is_normalized ? weight.data() : nullptr, 1e-6f, cosines.data(),
                        sines.data(), out.data());
      for (int h = 0; h < heads; ++h) {
        vector<double> x(in.begin() + h * D, in.begin() + (h + 1) * D);
        const double scale = inverse_rms_of(in.data() + h * D, D, 1e-6f);
        for (int i = 0; is_normalized && i < D; ++i) x[i] *= scale * weight[i];
        for (int i = 0; i < half; ++i) {
          const double bound = 1e-6 * (std::fabs(x[i]) + std::fabs(x[i + half]));
          const auto what = [&] { return text("rotation of %d, pair %d", D, i); };
          check_close(out[h * D + i], x[i] * cosines[i] - x[i + half] * sines[i], bound, what);
          check_close(out[h * D + i + half], x[i + half] * cosines[i] + x[i] * sines[i], bound, what);
        }
      }
    }
}

// A KV pool full of NaN, or of -1 where it holds integers, whose blocks are used in random order.
struct Cache {
  KVCache kv;
  vector<char> memory;
  vector<int32_t> table;

  Cache(int layers, int kv_heads, int head_dim, int block_size, bool is_int8, int blocks) {
    kv = {nullptr, layers, block_size, kv_heads, int32_t(round_up(head_dim, CELL)), is_int8};
    memory.assign(blocks * treadle_block_bytes(&kv) + 64, char(0xff));
    kv.base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    for (int i = 0; i < blocks; ++i) table.push_back(i);
    std::shuffle(table.begin(), table.end(), rng);
  }
};

void attention_is_close_and_does_not_depend_on_the_batch(bool is_int8, int block_size, int D, int group) {
  const int kv_heads = 2, heads = kv_heads * group, length = uniform(1, 100);
  Cache cache(1, kv_heads, D, block_size, is_int8, (length + block_size - 1) / block_size);
  const vector<float> keys = normals(size_t(length) * kv_heads * D), values = normals(keys.size());
  const vector<float> queries = normals(size_t(length) * heads * D, 2.0f);
  vector<int32_t> positions(length);
  for (int i = 0; i < length; ++i) positions[i] = i;
  treadle_op_store_kv(&cache.kv, cache.table.data(), positions.data(), length, D, keys.data(), values.data());
  const auto attention = [&](int first, int count, int per_item) {
    vector<float> out(size_t(count) * heads * D);
    treadle_op_attention(&cache.kv, cache.table.data(), first, count, heads, D, per_item,
                         queries.data() + size_t(first) * heads * D, out.data());
    return out;
  };
  const std::string where =
      text("attention, int8 %d, blocks of %d, heads of %d, group of %d", is_int8, block_size, D, group);
  const vector<float> out = attention(0, length, MAX_TOKENS);

  const auto rounded = [&](const vector<float>& x) {  // [.., D]
    vector<double> y;
    for (size_t at = 0; at < x.size(); at += D) {
      const Quantized q = quantize(x.data() + at, D);
      for (int d = 0; d < D; ++d) y.push_back(is_int8 ? q.q[d] * q.scale : bf16_of(x[at + d]));
    }
    return y;
  };
  const vector<double> exact_keys = rounded(keys), exact_values = rounded(values);
  const float softmax_scale = 1.44269504f / std::sqrt(float(D));
  for (int t = 0; t < length; ++t)
    for (int h = 0; h < heads; ++h) {
      vector<float> scaled(D);
      for (int d = 0; d < D; ++d) scaled[d] = queries[(size_t(t) * heads + h) * D + d] * softmax_scale;
      vector<double> query(scaled.begin(), scaled.end());
      if (is_int8 || sizeof(act) == 2) query = rounded(scaled);
      vector<double> scores, sums(D);
      for (int i = 0; i <= t; ++i) {
        const double* key = exact_keys.data() + (size_t(i) * kv_heads + h / group) * D;
        scores.push_back(0.0);
        for (int d = 0; d < D; ++d) scores[i] += query[d] * key[d];
      }
      const double highest = *std::max_element(scores.begin(), scores.end());
      double total = 0.0;
      for (int i = 0; i <= t; ++i) {
        const double* value = exact_values.data() + (size_t(i) * kv_heads + h / group) * D;
        const double p = std::exp2(scores[i] - highest);
        total += p;
        for (int d = 0; d < D; ++d) sums[d] += p * value[d];
      }
      // The roundings of probabilities: to 14 bits of the largest, to bfloat16, or none.
      const double tolerance = is_int8 ? 1e-3 : sizeof(act) == 2 ? 1e-2 : 1e-5;
      for (int d = 0; d < D; ++d)
        check_close(out[(size_t(t) * heads + h) * D + d], sums[d] / total, tolerance,
                    [&] { return where + text(", token %d of %d, head %d, column %d", t, length, h, d); });
    }

  const vector<float> single = attention(0, length, 1);
  check(!std::memcmp(single.data(), out.data(), out.size() * 4), "%s: items of one token differ", where.c_str());
  const int first = length / 2;
  const vector<float> rest = attention(first, length - first, MAX_TOKENS);
  check(!std::memcmp(rest.data(), out.data() + size_t(first) * heads * D, rest.size() * 4),
        "%s: the second half differs", where.c_str());
}

// A small model whose matrices have different formats.
struct SmallModel {
  static constexpr int HIDDEN = 256, INTERMEDIATE = 512, LAYERS = 2, HEADS = 4, KV_HEADS = 2, D = 80, VOCAB = 100;
  static constexpr int LENGTH = 90;
  vector<std::unique_ptr<Matrix>> matrices;
  vector<float> ones, cosines, sines;
  vector<Layer> layers;
  Model model;

  SmallModel(Format narrow, Format wide) : ones(512, 1.0f) {
    for (int p = 0; p < LENGTH; ++p)
      for (int i = 0; i < D / 2; ++i) {
        const double angle = p / std::pow(1e4, 2.0 * i / D);
        cosines.push_back(float(std::cos(angle)));
        sines.push_back(float(std::sin(angle)));
      }
    const int q = HEADS * D, kv = KV_HEADS * D;
    for (int i = 0; i < LAYERS; ++i) {
      const Weights wq = matrix(narrow, q, HIDDEN), wk = matrix(wide, kv, HIDDEN), wv = matrix(narrow, kv, HIDDEN);
      const Weights wo = matrix(narrow == Q4_K ? Q4_1 : narrow, HIDDEN, q);  // q is no multiple of 256
      const Weights gate = matrix(narrow, INTERMEDIATE, HIDDEN), up = matrix(wide, INTERMEDIATE, HIDDEN);
      const Weights down = matrix(narrow, HIDDEN, INTERMEDIATE);
      layers.push_back({ones.data(), wq, wk, wv, ones.data(), ones.data(), wo, ones.data(), gate, up, down,
                        cosines.data(), sines.data()});
    }
    const Weights embedding = matrix(wide, VOCAB, HIDDEN);
    const int32_t narrowing = narrow == BF16 ? NARROW_BF16 : narrow == INT8 ? NARROW_INT8 : NARROW_BLOCKS;
    model = {HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, D, VOCAB, narrowing, 1e-5f, embedding,
             layers.data(), ones.data(), embedding};
  }

  Weights matrix(Format format, int rows, int columns) {
    matrices.push_back(std::make_unique<Matrix>(format, rows, columns));
    return matrices.back()->weights;
  }

  // Logits [tokens, vocab] of one sequence that is computed in chunks of up to `chunk` tokens.
  vector<float> logits(const vector<int32_t>& ids, bool is_int8, int chunk, int threads) const {
    Cache cache(LAYERS, KV_HEADS, D, 16, is_int8, LENGTH / 16 + 1);
    void* engine = treadle_create(&model, &cache.kv);
    vector<float> out(ids.size() * VOCAB);
    for (int first = 0; first < int(ids.size()); first += chunk) {
      const int count = std::min(chunk, int(ids.size()) - first);
      vector<int32_t> positions, tokens, best(count);
      for (int i = 0; i < count; ++i) {
        positions.push_back(first + i);
        tokens.push_back(i);
      }
      const vector<int32_t> rows(count, 0), start{0}, counts{count};
      const Step step{ids.data() + first, positions.data(), rows.data(), cache.table.data(), start.data(),
                      counts.data(), int64_t(cache.table.size()), count, 1, threads};
      check(treadle_forward(engine, &step) == 0, "treadle_forward ran out of memory");
      const int32_t failed = treadle_logits(engine, tokens.data(), count, tokens.data(),
                                            out.data() + size_t(first) * VOCAB, best.data(), threads);
      check(failed == 0, "treadle_logits ran out of memory");
      for (int i = 0; i < count; ++i) {
        const float* row = out.data() + size_t(first + i) * VOCAB;
        const int32_t highest = int32_t(std::max_element(row, row + VOCAB) - row);
        check(best[i] == highest, "the best token is %d, not %d", highest, best[i]);
      }
    }
    treadle_destroy(engine);
    return out;
  }

  // The same in double, without a rounding of activations, keys or values.
  vector<double> exact_logits(const vector<int32_t>& ids) const {
    const int n = int(ids.size());
    vector<vector<double>> hidden(n);
    const Matrix& embedding = *matrices.back();
    for (int t = 0; t < n; ++t)
      hidden[t].assign(embedding.values.begin() + ids[t] * HIDDEN, embedding.values.begin() + (ids[t] + 1) * HIDDEN);
    const auto normalized = [](const double* x, int size, double eps) {
      double squares = 0.0;
      for (int i = 0; i < size; ++i) squares += x[i] * x[i];
      vector<double> y(x, x + size);
      for (double& value : y) value /= std::sqrt(squares / size + eps);
      return y;
    };
    const auto times = [](const Matrix& m, const vector<double>& x) {
      vector<double> y;
      for (int r = 0; r < m.rows; ++r) y.push_back(product(m, x.data(), r).value);
      return y;
    };
    const auto rotated = [&](const vector<double>& x, int position) {
      vector<double> y;
      for (size_t h = 0; h < x.size() / D; ++h) {
        const vector<double> head = normalized(x.data() + h * D, D, 1e-5);
        for (int i = 0; i < D; ++i) {
          const int pair = i % (D / 2);
          const double c = cosines[position * (D / 2) + pair], s = sines[position * (D / 2) + pair];
          y.push_back(i < D / 2 ? head[pair] * c - head[pair + D / 2] * s : head[i] * c + head[pair] * s);
        }
      }
      return y;
    };
    for (int i = 0; i < LAYERS; ++i) {
      const auto* m = &matrices[i * 7];
      vector<vector<double>> queries, keys, values;
      for (int t = 0; t < n; ++t) {
        const vector<double> x = normalized(hidden[t].data(), HIDDEN, 1e-5);
        queries.push_back(rotated(times(*m[0], x), t));
        keys.push_back(rotated(times(*m[1], x), t));
        values.push_back(times(*m[2], x));
      }
      for (int t = 0; t < n; ++t) {
        vector<double> attended(HEADS * D);
        for (int h = 0; h < HEADS; ++h) {
          const int from = h / (HEADS / KV_HEADS) * D;
          vector<double> p;
          double total = 0.0;
          for (int j = 0; j <= t; ++j) {
            double score = 0.0;
            for (int d = 0; d < D; ++d) score += queries[t][h * D + d] * keys[j][from + d];
            p.push_back(std::exp(score / std::sqrt(double(D))));
            total += p.back();
          }
          for (int j = 0; j <= t; ++j)
            for (int d = 0; d < D; ++d) attended[h * D + d] += p[j] / total * values[j][from + d];
        }
        const vector<double> o = times(*m[3], attended);
        for (int d = 0; d < HIDDEN; ++d) hidden[t][d] += o[d];
        const vector<double> x = normalized(hidden[t].data(), HIDDEN, 1e-5);
        vector<double> gate = times(*m[4], x);
        const vector<double> up = times(*m[5], x);
        for (int d = 0; d < INTERMEDIATE; ++d) gate[d] = gate[d] / (1 + std::exp(-gate[d])) * up[d];
        const vector<double> down = times(*m[6], gate);
        for (int d = 0; d < HIDDEN; ++d) hidden[t][d] += down[d];
      }
    }
    vector<double> out;
    for (int t = 0; t < n; ++t)
      for (double logit : times(embedding, normalized(hidden[t].data(), HIDDEN, 1e-5))) out.push_back(logit);
    return out;
  }
};

void a_model_is_close_and_does_not_depend_on_the_schedule(Format narrow, Format wide) {
  const SmallModel small(narrow, wide);
  vector<int32_t> ids(SmallModel::LENGTH);
  for (auto& id : ids) id = uniform(0, SmallModel::VOCAB - 1);
  const vector<double> exact = small.exact_logits(ids);
  double squares = 0.0;
  for (double x : exact) squares += x * x;
  for (bool is_int8 : {false, true}) {
    const std::string what = text("a model of %s and %s, int8 KV %d", name_of(narrow), name_of(wide), is_int8);
    const vector<float> whole = small.logits(ids, is_int8, SmallModel::LENGTH, 1);
    double errors = 0.0;
    for (size_t i = 0; i < whole.size(); ++i) errors += (whole[i] - exact[i]) * (whole[i] - exact[i]);
    check_close(std::sqrt(errors / squares), 0.0, 0.05, [&] { return what + ", relative error of the logits"; });
    for (auto [chunk, threads] : {std::pair{1, 1}, {7, 2}, {32, 3}, {SmallModel::LENGTH, 2}}) {
      const vector<float> other = small.logits(ids, is_int8, chunk, threads);
      check(!std::memcmp(other.data(), whole.data(), whole.size() * 4), "%s: chunks of %d on %d threads differ",
            what.c_str(), chunk, threads);
    }
  }
}

void draws_follow_the_distribution() {
  const int vocab = uniform(1, 700);
  const vector<float> logits = normals(vocab, 3.0f);
  const int32_t place = 0;
  const float temperature = 0.5f + float(uniform(0, 100)) / 100, min_p = uniform(0, 2) ? 0.0f : 0.02f;
  const float top_p = uniform(0, 1) ? 1.0f : 0.9f;
  const int32_t top_k = uniform(0, 1) ? 0 : uniform(1, 20);
  vector<std::pair<double, int>> sorted;
  const float highest = *std::max_element(logits.begin(), logits.end());
  for (int i = 0; i < vocab; ++i) sorted.push_back({-std::exp((double(logits[i]) - highest) / temperature), i});
  std::sort(sorted.begin(), sorted.end());
  if (top_k > 0 && top_k < vocab) sorted.resize(top_k);
  double total = 0.0, sum = 0.0;
  for (auto& [p, id] : sorted) total -= p;
  size_t kept = 0;
  while (kept < sorted.size() && (top_p >= 1.0f || sum < top_p * total) && -sorted[kept].first >= min_p)
    sum -= sorted[kept++].first;
  sorted.resize(kept);
  std::sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.second < b.second; });

  const double noise = double(rng()) / 4294967296.0;
  const uint8_t greedy = uniform(0, 3) == 0;
  int32_t token = -1;
  const Draws draws{logits.data(), &place,  &temperature, &top_p, &min_p, &top_k,
                    &noise,        &greedy, &token,       1,      vocab,  1};
  check(treadle_draw(&draws) == 0, "treadle_draw ran out of memory");
  if (greedy) return check(logits[token] == highest, "a greedy draw is not the most likely token");
  double start = 0.0;
  for (auto& [p, id] : sorted) {
    if (id == token) {
      const double target = noise * sum;
      const double slack = 1e-4 * sum;
      return check(target > start - slack && target < start - p + slack, "token %d is not the drawn one", token);
    }
    start -= p;
  }
  check(false, "token %d of %d does not pass the filters top_k %d, top_p %g, min_p %g", token, vocab, top_k, top_p,
        min_p);
}

void reported_logprobs_are_close() {
  const int vocab = uniform(1, 700);
  const vector<float> logits = normals(vocab, 3.0f);
  const int32_t place = 0, token = uniform(0, vocab - 1), wanted = 5;
  vector<int> order(vocab);
  for (int i = 0; i < vocab; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  double total = 0.0;
  for (float x : logits) total += std::exp(double(x));
  float logprob, top[5];
  int32_t rank, ids[5];
  const Reports reports{logits.data(), &place, &token, &wanted, &logprob, &rank, ids, top, 1, 5, vocab, 1};
  check(treadle_report(&reports) == 0, "treadle_report ran out of memory");
  check_close(logprob, logits[token] - std::log(total), 1e-5, [] { return "logprob"; });
  const auto above = std::count_if(logits.begin(), logits.end(), [&](float x) { return x > logits[token]; });
  check(rank == above + 1, "the rank of token %d is %d, not %d", token, int(above) + 1, rank);
  for (int i = 0; i < std::min(5, vocab); ++i) {
    check(ids[i] == order[i], "top token %d is %d, not %d", i, order[i], ids[i]);
    check_close(top[i], logits[order[i]] - std::log(total), 1e-5, [] { return "top logprob"; });
  }
}

}  // namespace

int main() {
  exp2_is_accurate();
  for (Format format : FORMATS)
    for (int round = 0; round < 4; ++round) {
      rows_unpack_to_the_values_of_the_file(format);
      products_of_integers_are_exact(format);
      products_are_close_and_do_not_depend_on_the_batch(format);
      gated_products_are_close(format);
    }
  for (int round = 0; round < 20; ++round) norms_are_close();
  rotations_are_close();
  for (bool is_int8 : {false, true})
    for (int block_size : {16, 5, 32})
      for (int D : {64, 80})
        for (int group : {1, 3, 8})
          attention_is_close_and_does_not_depend_on_the_batch(is_int8, block_size, D, group);
  a_model_is_close_and_does_not_depend_on_the_schedule(BF16, BF16);
  a_model_is_close_and_does_not_depend_on_the_schedule(INT8, INT8);
  a_model_is_close_and_does_not_depend_on_the_schedule(Q4_0, Q6_K);
  a_model_is_close_and_does_not_depend_on_the_schedule(Q4_K, Q8_0);
  for (int round = 0; round < 300; ++round) {
    draws_follow_the_distribution();
    reported_logprobs_are_close();
  }
  std::printf("%d checks passed, %d floats a vector\n", checks, W);
}
