// kvreclaim._native.
#include "bind.h"
#include "kvreclaim/pool.h"
#include "kvreclaim/table.h"

// Facts of the build; CMake gives the commit where it is known.
#ifndef KVR_COMMIT
#define KVR_COMMIT ""
#endif
#ifdef __clang__
#define KVR_COMPILER "clang " KVR_TEXT(__clang_major__) "." KVR_TEXT(__clang_minor__) "." KVR_TEXT(__clang_patchlevel__)
#else
#define KVR_COMPILER "gcc " __VERSION__
#endif
#define KVR_TEXT(x) KVR_TEXT_OF(x)
#define KVR_TEXT_OF(x) #x

NB_MODULE(_native, m) {
  namespace nb = nanobind;
  m.doc() = "CPU kernels; call them through kvreclaim.ops.native";
  kvreclaim::bind_cache(m);
  kvreclaim::bind_attention(m);
  kvreclaim::bind_linear(m);
  kvreclaim::bind_decoder(m);
  kvreclaim::bind_packed(m);
  kvreclaim::bind_recurrent(m);
  kvreclaim::bind_scoring(m);
  kvreclaim::bind_compact(m);
  m.def("isa", [] { return nb::str(kvreclaim::kernels().isa); });
  m.def("supported_isas", [] {
    nb::list names;
    for (const char* const* name = kvreclaim::supported_isas(); *name != nullptr; ++name) names.append(*name);
    return names;
  });
  m.def("set_isa", &kvreclaim::set_isa, nb::arg("name"));
  m.attr("COMPILER") = KVR_COMPILER;
  m.attr("COMMIT") = KVR_COMMIT;
  m.attr("COMPILED_ISAS") = kvreclaim::compiled_isas();
  m.def("max_threads", &kvreclaim::max_threads);
  m.def("set_max_threads", &kvreclaim::set_max_threads, nb::arg("threads"));
  m.def("lacks_cores", &kvreclaim::lacks_cores);
  m.def("lack_cores", &kvreclaim::lack_cores, nb::arg("lacking"));
}
