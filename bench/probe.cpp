// What this machine can do at most: bytes read per second, and multiply-adds per second of the dot products.
#include <immintrin.h>
#include <omp.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

template <class F>
double best_of(int repeats, const F& f) {
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const double start = omp_get_wtime();
    f();
    const double seconds = omp_get_wtime() - start;
    if (seconds < best) best = seconds;
  }
  return best;
}

int main() {
  const size_t size = size_t(256) << 20;
  char* data = static_cast<char*>(aligned_alloc(size_t(2) << 20, size));
  madvise(data, size, MADV_HUGEPAGE);
#pragma omp parallel for
  for (size_t i = 0; i < size; ++i) data[i] = char(i);
  volatile int sink = 0;
  const double read = best_of(5, [&] {
#pragma omp parallel
    {
      __m256i sum = _mm256_setzero_si256();
#pragma omp for
      for (size_t i = 0; i < size; i += 256)
        for (int j = 0; j < 256; j += 32) sum = _mm256_xor_si256(sum, _mm256_load_si256((const __m256i*)(data + i + j)));
      sink = sink + _mm256_extract_epi32(sum, 0);
    }
  });
  std::printf("{\"read_gb_per_s\": %.1f", size / read / 1e9);
  const int64_t rounds = 3000000;
#if defined(__AVX512BF16__)
  const double bf16 = best_of(3, [&] {
#pragma omp parallel
    {
      __m512 sums[12];
      for (auto& s : sums) s = _mm512_setzero_ps();
      __m512bh a = (__m512bh)_mm512_set1_epi32(omp_get_thread_num());
      for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
        for (auto& s : sums) s = _mm512_dpbf16_ps(s, a, a);
        asm volatile("" : "+v"(a));
      }
      float total = 0;
      for (auto& s : sums) total += _mm512_cvtss_f32(s);
      sink = sink + int(total);
    }
  });
  std::printf(", \"bf16_gmac_per_s\": %.0f", omp_get_max_threads() * rounds * 12 * 32 / bf16 / 1e9);
#endif
#if defined(__AVX512VNNI__)
  const double int8 = best_of(3, [&] {
#pragma omp parallel
    {
      __m512i sums[12];
      for (auto& s : sums) s = _mm512_setzero_si512();
      __m512i a = _mm512_set1_epi32(omp_get_thread_num());
      for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
        for (auto& s : sums) s = _mm512_dpbusd_epi32(s, a, a);
        asm volatile("" : "+v"(a));
      }
      int total = 0;
      for (auto& s : sums) total += _mm_cvtsi128_si32(_mm512_castsi512_si128(s));
      sink = sink + total;
    }
  });
  std::printf(", \"int8_gmac_per_s\": %.0f", omp_get_max_threads() * rounds * 12 * 64 / int8 / 1e9);
#endif
  std::printf("}\n");
}
