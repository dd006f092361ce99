# One object library per instruction set; kvr_kernels is their sum with the dispatcher and the threads.
add_library(kvr_kernels STATIC src/dispatch.cpp src/pool.cpp)
target_include_directories(kvr_kernels PUBLIC include)
target_link_libraries(kvr_kernels PUBLIC ${KVR_OPENMP})
target_compile_options(kvr_kernels PUBLIC -fvisibility=hidden -Wall -Wextra)

function(kvr_add_isa name)
  add_library(kvr_${name} OBJECT src/attention.cpp src/kernels.cpp)
  target_include_directories(kvr_${name} PRIVATE include)
  target_compile_definitions(kvr_${name} PRIVATE KVR_NS=${name})
  target_compile_options(kvr_${name} PRIVATE -O3 -fvisibility=hidden -fno-math-errno -fno-trapping-math
    -Wall -Wextra -Wno-psabi -Wno-uninitialized
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized> $<$<CXX_COMPILER_ID:Clang>:-Wno-unused-private-field> ${ARGN})
  target_sources(kvr_kernels PRIVATE $<TARGET_OBJECTS:kvr_${name}>)
endfunction()

kvr_add_isa(baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_compile_definitions(kvr_kernels PRIVATE KVR_X86)
  kvr_add_isa(avx2 -mavx2 -mfma -mf16c)
  set(avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  kvr_add_isa(avx512 ${avx512})
  kvr_add_isa(avx512vnni ${avx512} -mavx512vnni)
  set(bf16 ${avx512} -mavx512vnni -mavx512bf16)
  kvr_add_isa(avx512bf16 ${bf16})
  kvr_add_isa(amx ${bf16} -mamx-tile -mamx-bf16)
endif()

if(KVR_SANITIZE)
  foreach(target kvr_kernels kvr_baseline kvr_avx2 kvr_avx512 kvr_avx512vnni kvr_avx512bf16 kvr_amx)
    if(TARGET ${target})
      target_compile_options(${target} PRIVATE -g -O1 -fsanitize=${KVR_SANITIZE} -fno-sanitize-recover=all
        -fno-omit-frame-pointer)
    endif()
  endforeach()
endif()
