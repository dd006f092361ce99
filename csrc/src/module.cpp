// kvreclaim._native.
#include "bind.h"
#include "kvreclaim/pool.h"
#include "kvreclaim/table.h"

NB_MODULE(_native, m) {
  namespace nb = nanobind;
  m.doc() = "CPU kernels; call them through kvreclaim.ops.native";
  kvreclaim::bind_cache(m);
  kvreclaim::bind_attention(m);
  kvreclaim::bind_linear(m);
  kvreclaim::bind_decoder(m);
  kvreclaim::bind_packed(m);
  kvreclaim::bind_scoring(m);
  kvreclaim::bind_compact(m);
  m.def("isa", [] { return nb::str(kvreclaim::kernels().isa); });
  m.def("supported_isas", [] {
    nb::list names;
    for (const char* const* name = kvreclaim::supported_isas(); *name != nullptr; ++name) names.append(*name);
    return names;
  });
  m.def("set_isa", &kvreclaim::set_isa, nb::arg("name"));
  m.def("max_threads", &kvreclaim::max_threads);
  m.def("set_max_threads", &kvreclaim::set_max_threads, nb::arg("threads"));
  m.def("lacks_cores", &kvreclaim::lacks_cores);
  m.def("lack_cores", &kvreclaim::lack_cores, nb::arg("lacking"));
}
