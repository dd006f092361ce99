# One object library per instruction set; kvr_kernels is their sum with the dispatcher and the threads.
add_library(kvr_kernels STATIC src/dispatch.cpp src/pool.cpp)
target_include_directories(kvr_kernels PUBLIC include)
target_link_libraries(kvr_kernels PUBLIC ${KVR_OPENMP})
target_compile_options(kvr_kernels PUBLIC -fvisibility=hidden -Wall -Wextra)

set(KVR_ISAS "" CACHE STRING "Instruction sets beside the baseline; empty: all")

set(KVR_SANITIZE_ISAS "" CACHE STRING "Instruction sets to sanitize, baseline among them; empty: all")

function(kvr_compile target name)
  target_include_directories(${target} PRIVATE include)
  target_compile_definitions(${target} PRIVATE KVR_NS=${name})
  target_compile_options(${target} PRIVATE -O3 -fvisibility=hidden -fno-math-errno -fno-trapping-math
    -Wall -Wextra -Wno-psabi -Wno-uninitialized
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized> $<$<CXX_COMPILER_ID:Clang>:-Wno-unused-private-field> ${ARGN})
endfunction()

function(kvr_add_isa name)
  set(sources src/attention.cpp src/kernels.cpp src/recurrent.cpp)
  if(KVR_ISAS AND NOT name STREQUAL baseline AND NOT name IN_LIST KVR_ISAS)
    if(KVR_TESTS)  # that the sources compile is tested even so; unoptimised it takes a sixth of the time
      add_library(kvr_unlinked_${name} OBJECT ${sources})
      kvr_compile(kvr_unlinked_${name} ${name} ${ARGN} -O0)
    endif()
    set(sources src/absent.cpp)
  endif()
  add_library(kvr_${name} OBJECT ${sources})
  kvr_compile(kvr_${name} ${name} ${ARGN})
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
  foreach(name kernels baseline avx2 avx512 avx512vnni avx512bf16 amx)
    set(target kvr_${name})
    if(TARGET ${target} AND (NOT KVR_SANITIZE_ISAS OR name STREQUAL kernels OR name IN_LIST KVR_SANITIZE_ISAS))
      target_compile_options(${target} PRIVATE -g -O1 -fsanitize=${KVR_SANITIZE} -fno-sanitize-recover=all
        -fno-omit-frame-pointer)
    endif()
  endforeach()
endif()
