// Declarations, no more, of what op_host uses of CANN: that it compiles against these shows that its own text is C++ and
// calls these names with these arguments. Written for the tests from the public documentation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace ge {

using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0, GRAPH_FAILED = 1;
enum DataType { DT_FLOAT, DT_FLOAT16, DT_BF16, DT_BOOL };
enum Format { FORMAT_ND, FORMAT_NCHW, FORMAT_NHWC, FORMAT_FRACTAL_NZ };
int GetSizeByDataType(DataType type);

}  // namespace ge

namespace gert {

class Shape {
 public:
  size_t GetDimNum() const;
  int64_t GetDim(size_t i) const;
  int64_t GetShapeSize() const;
  void SetDimNum(size_t n);
  Shape& AppendDim(int64_t size);
};

class StorageShape {
 public:
  const Shape& GetStorageShape() const;
};

class CompileTimeTensorDesc {
 public:
  ge::DataType GetDataType() const;
};

class RuntimeAttrs {
 public:
  template <class T>
  const T* GetAttrPointer(size_t i) const;
};

class TilingContext {
 public:
  void* GetPlatformInfo() const;
  const StorageShape* GetInputShape(size_t i) const;
  const StorageShape* GetOutputShape(size_t i) const;
  const CompileTimeTensorDesc* GetInputDesc(size_t i) const;
  const CompileTimeTensorDesc* GetOutputDesc(size_t i) const;
  const RuntimeAttrs* GetAttrs() const;
  template <class T>
  T* GetTilingData();
  ge::graphStatus SetBlockDim(uint32_t blocks);
  size_t* GetWorkspaceSizes(size_t count);
};

class InferShapeContext {
 public:
  const Shape* GetInputShape(size_t i) const;
  Shape* GetOutputShape(size_t i);
};

class InferDataTypeContext {
 public:
  ge::DataType GetInputDataType(size_t i) const;
  ge::graphStatus SetOutputDataType(size_t i, ge::DataType type);
};

}  // namespace gert

namespace ops {

enum Option { REQUIRED, OPTIONAL };

class OpParamDef {
 public:
  OpParamDef& ParamType(Option option);
  OpParamDef& DataType(std::initializer_list<ge::DataType> types);
  OpParamDef& Format(std::initializer_list<ge::Format> formats);
  OpParamDef& UnknownShapeFormat(std::initializer_list<ge::Format> formats);
};

class OpAttrDef {
 public:
  OpAttrDef& AttrType(Option option);
  OpAttrDef& Float();
  OpAttrDef& Float(float value);
  OpAttrDef& Int();
  OpAttrDef& Int(int64_t value);
  OpAttrDef& Bool();
  OpAttrDef& Bool(bool value);
};

class OpAICoreDef {
 public:
  OpAICoreDef& SetTiling(ge::graphStatus (*tiling)(gert::TilingContext*));
  OpAICoreDef& AddConfig(const char* processor);
};

class OpDef {
 public:
  explicit OpDef(const char* name);
  OpParamDef& Input(const char* name);
  OpParamDef& Output(const char* name);
  OpAttrDef& Attr(const char* name);
  OpDef& SetInferShape(ge::graphStatus (*infer)(gert::InferShapeContext*));
  OpDef& SetInferDataType(ge::graphStatus (*infer)(gert::InferDataTypeContext*));
  OpAICoreDef& AICore();
};

}  // namespace ops

#define OP_ADD(Op) static Op Op##_registered(#Op)
