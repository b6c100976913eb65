// The two exceptions of the native part: a system call failed, with its errno; a call of the GPU runtime
// failed, with its code. Both carry the name of the call.
#pragma once

#include <cerrno>
#include <exception>

namespace ckptio {

class SystemError : public std::exception {
  public:
    SystemError(int code, const char* operation) noexcept : code_(code), operation_(operation) {}

    int code() const noexcept { return code_; }
    const char* what() const noexcept override { return operation_; }

  private:
    int code_;
    const char* operation_;  // a string literal
};

class DeviceError : public std::exception {
  public:
    DeviceError(int code, const char* operation) noexcept : code_(code), operation_(operation) {}

    int code() const noexcept { return code_; }
    const char* what() const noexcept override { return operation_; }

  private:
    int code_;
    const char* operation_;  // a string literal
};

[[noreturn]] inline void throw_errno(const char* operation) { throw SystemError(errno, operation); }

}  // namespace ckptio
