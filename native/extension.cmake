# The Python extension kvasir/native/_native and where it is installed.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS Development.SABIModule)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "nanobind is missing: ${Python_EXECUTABLE} -m pip install nanobind, or put it on PYTHONPATH.")
endif()
find_package(nanobind CONFIG REQUIRED)

file(GLOB bind_sources CONFIGURE_DEPENDS native/bind/*.cpp)
# A domain of our own: types of another nanobind extension never meet ours.
nanobind_add_module(_native STABLE_ABI NB_STATIC NB_DOMAIN kvasir ${bind_sources})
target_link_libraries(_native PRIVATE kvasir_core kvasir_options)
# nanobind's own files in three lumps: a third of the time a second clone waits.
foreach(library nanobind-static nanobind-static-abi3)
  if(TARGET ${library})
    set_target_properties(${library} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 5)
  endif()
endforeach()

# Nothing but the module's entry point leaves the file, so another llama.cpp in the process cannot meet ours.
if(APPLE)
  target_link_options(_native PRIVATE -Wl,-exported_symbol,_PyInit__native -Wl,-dead_strip)
else()
  # The map also hides what the C++ library's templates instantiate, which no visibility flag reaches.
  set(exports "${CMAKE_CURRENT_SOURCE_DIR}/native/exports.map")
  target_link_options(_native PRIVATE -Wl,--exclude-libs,ALL -Wl,--gc-sections "-Wl,--version-script=${exports}")
  set_target_properties(_native PROPERTIES LINK_DEPENDS "${exports}")
  # native/core/pages.cpp gives ggml's large buffers large pages.
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    target_link_options(_native PRIVATE -Wl,--wrap=posix_memalign -Wl,-u,__wrap_posix_memalign)
  endif()
endif()

# Without pip, `cmake --install build` completes the package in the clone: PYTHONPATH=src then finds it.
if(CMAKE_INSTALL_PREFIX_INITIALIZED_TO_DEFAULT AND NOT SKBUILD)
  set(CMAKE_INSTALL_PREFIX "${CMAKE_CURRENT_SOURCE_DIR}/src" CACHE PATH "the package's parent" FORCE)
endif()
install(TARGETS _native DESTINATION kvasir/native COMPONENT kvasir)

# The extension contains llama.cpp, what that vendors, and nanobind: their licences travel with it.
function(install_licence file name)
  if(EXISTS "${file}")
    install(FILES "${file}" DESTINATION kvasir/licenses RENAME "${name}" COMPONENT kvasir)
  endif()
endfunction()
install_licence("${KVASIR_LLAMA_SOURCE_DIR}/LICENSE" LICENSE-llama.cpp)
install_licence("${KVASIR_LLAMA_SOURCE_DIR}/vendor/cpp-httplib/LICENSE" LICENSE-cpp-httplib)
file(GLOB nanobind_licence "${nanobind_ROOT}/../../nanobind-*.dist-info/licenses/LICENSE")
install_licence("${nanobind_licence}" LICENSE-nanobind)
file(GLOB licences "${KVASIR_LLAMA_SOURCE_DIR}/licenses/*")
install(FILES ${licences} DESTINATION kvasir/licenses COMPONENT kvasir)
