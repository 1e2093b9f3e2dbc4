package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	yamlnode "go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	strict "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// entry is one object of a file.
type entry struct {
	key    key
	object metav1.Object // nil if there is a problem
	// unsupported is set if the kind exists and is not supported. mistyped is set if it does not exist.
	unsupported, mistyped bool
	// problem says why the object is not valid.
	problem string
}

// document is one YAML or JSON document of a file.
type document struct {
	text  []byte
	lines int // the number of lines before the document
	json  bool
}

// decode returns the objects of a file. If one document cannot be decoded, decode returns no entries,
// because the file may be incomplete.
func decode(data []byte, isJSON bool) ([]entry, error) {
	if !utf8.Valid(data) {
		return nil, errors.New("the file is not UTF-8: save it as UTF-8 text")
	}
	documents := []document{{text: data, json: true}}
	if !isJSON {
		documents = split(data)
	}
	var all []entry
	number := 0
	for _, d := range documents {
		raw, err := d.toJSON()
		if err == nil && raw == nil {
			continue
		}
		number++
		var entries []entry
		if err == nil {
			entries, err = d.decode(raw)
		}
		if err != nil {
			return nil, fmt.Errorf("document %d, %w", number, err)
		}
		all = append(all, entries...)
	}
	return all, nil
}

// split returns the documents of a YAML stream (YAML 1.1 §9.1). The parser reads only the first
// document of its input. A document may be empty.
func split(data []byte) (documents []document) {
	start, lines := 0, 0
	for at, line := 0, 0; at < len(data); line++ {
		if isMarker(data[at:]) {
			documents = append(documents, document{text: data[start:at], lines: lines})
			start, lines = at, line
			if data[at] == '.' { // the parser does not accept an end marker before the content
				start += markerLength
			}
		}
		at += lineLength(data[at:])
	}
	return append(documents, document{text: data[start:], lines: lines})
}

// lineBreaks are the line breaks of YAML 1.1 §4.2, which the parser uses.
const lineBreaks = "\n\r\u0085\u2028\u2029"

// lineLength returns the number of bytes of the first line, with its line break.
func lineLength(data []byte) int {
	end := bytes.IndexAny(data, lineBreaks)
	if end < 0 {
		return len(data)
	}
	if bytes.HasPrefix(data[end:], []byte("\r\n")) {
		return end + len("\r\n")
	}
	_, size := utf8.DecodeRune(data[end:])
	return end + size
}

const markerLength = len("---")

// isMarker reports whether the first line of data begins or ends a document.
func isMarker(data []byte) bool {
	if !bytes.HasPrefix(data, []byte("---")) && !bytes.HasPrefix(data, []byte("...")) {
		return false
	}
	next, _ := utf8.DecodeRune(data[markerLength:])
	return len(data) == markerLength || strings.ContainsRune(" \t"+lineBreaks, next)
}

// toJSON converts the document to JSON. It returns nil for an empty document.
func (d document) toJSON() ([]byte, error) {
	raw := d.text
	if !d.json {
		var err error
		if raw, err = yaml.YAMLToJSONStrict(d.text); err != nil {
			return nil, d.explainYAML()
		}
	}
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	return raw, nil
}

// header has the fields of an object that are decoded before its kind is known.
type header struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"metadata"`
}

// list is a List, the object in which kubectl writes several objects.
type list struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []json.RawMessage `json:"items"`
}

// decode returns the objects of the document. raw is the document as JSON.
func (d document) decode(raw []byte) ([]entry, error) {
	head, err := d.header(raw, "")
	if err != nil {
		return nil, err
	}
	if head.Kind != "List" {
		e, err := d.object(raw, "")
		return []entry{e}, err
	}
	var l list
	if err := d.decodeStrict(raw, &l, ""); err != nil {
		return nil, err
	}
	entries := make([]entry, len(l.Items))
	for i, item := range l.Items {
		if entries[i], err = d.object(item, fmt.Sprintf("items[%d]", i)); err != nil {
			return nil, err
		}
	}
	return entries, nil
}

// header decodes the header of an object. raw is the object as JSON, and at is the object's path in the document.
func (d document) header(raw []byte, at string) (head header, err error) {
	if err := strict.UnmarshalCaseSensitivePreserveInts(raw, &head); err != nil {
		return head, d.explain(raw, &head, at, err)
	}
	if head.Kind == "" {
		return head, d.errorAt(join(at, "kind"), "it is missing: set one of "+kindNames())
	}
	return head, nil
}

// object decodes an object. raw is the object as JSON, and at is the object's path in the document. If the kind, the
// apiVersion or a value is not valid, the entry has a problem. If raw cannot be decoded, object returns an
// error.
func (d document) object(raw []byte, at string) (entry, error) {
	head, err := d.header(raw, at)
	if err != nil {
		return entry{}, err
	}
	e := entry{key: key{head.Kind, head.Metadata.Namespace, head.Metadata.Name}}
	k, known := kinds[head.Kind]
	if !known {
		e.unsupported = kindExists(head.TypeMeta)
		e.mistyped = !e.unsupported
		e.problem = fmt.Sprintf("kind: %q is not supported: supported kinds are %s", head.Kind, kindNames())
		return e, nil
	}
	e.key.namespace = k.namespace(e.key.namespace)
	if head.APIVersion != k.apiVersion {
		e.problem = fmt.Sprintf("apiVersion: %q: the apiVersion of a %s is %s", head.APIVersion, head.Kind, k.apiVersion)
		return e, nil
	}
	o := k.empty()
	if err := d.decodeStrict(raw, o, at); err != nil {
		return entry{}, err
	}
	if errs := append(completeMeta(head.Kind, k, o), k.complete(o)...); len(errs) > 0 {
		e.problem = joined(errs)
		return e, nil
	}
	e.object = o
	return e, nil
}

// decodeStrict decodes an object. raw is the object as JSON, and at is the object's path in the document. Unknown fields,
// duplicate fields, and names with the wrong case are errors.
func (d document) decodeStrict(raw []byte, into any, at string) error {
	errs, err := strict.UnmarshalStrict(raw, into)
	if err != nil {
		return d.explain(raw, into, at, err)
	}
	const maxErrors = 5
	for i, err := range errs[:min(maxErrors, len(errs))] {
		if fieldErr, ok := errors.AsType[strict.FieldError](err); ok {
			path := fieldErr.FieldPath()
			fieldErr.SetFieldPath(path[strings.LastIndex(path, ".")+1:])
			errs[i] = d.errorAt(join(at, path), fieldErr.Error()+": remove it, or correct its name")
		}
	}
	if len(errs) > 0 {
		return errors.New(joined(errs[:min(maxErrors, len(errs))]))
	}
	return nil
}

// aliases matches the quoted values in parser errors about YAML aliases. They must not be shown: a
// value that begins with an asterisk may be a password.
var aliases = regexp.MustCompile("(unknown anchor) '.*?'|`.*`")

// explainYAML says why the document is not valid YAML. So that the parser reports the line of the file, it
// parses the document again, after an empty line for each line of the file before the document.
func (d document) explainYAML() error {
	_, err := yaml.YAMLToJSONStrict(append(bytes.Repeat([]byte("\n"), d.lines), d.text...))
	reason, isYAML := strings.CutPrefix(fmt.Sprint(err), "yaml: ")
	if !isYAML { // the conversion to JSON failed; its error contains values
		return d.errorAt("", "a key is null or a list, or a number is infinite, which JSON does not allow")
	}
	reason = strings.Join(strings.Fields(strings.TrimPrefix(reason, "unmarshal errors:")), " ")
	return errors.New(aliases.ReplaceAllString(reason, "$1 …"))
}

// explain returns an error that names the field that cannot be decoded. err is the decoder's error about raw,
// an object as JSON. at is the object's path in the document.
func (d document) explain(raw []byte, into any, at string, err error) error {
	if isSyntax, offset := strict.SyntaxErrorOffset(err); isSyntax {
		return fmt.Errorf("line %d: %w", 1+bytes.Count(raw[:min(int(offset), len(raw))], []byte("\n")), err)
	}
	var value any
	if err := json.Unmarshal(raw, &value); err != nil {
		return d.errorAt(at, err.Error())
	}
	path, reason := findInvalid(reflect.TypeOf(into).Elem(), value, "")
	if reason == "" { // err may contain values of a Secret
		reason = "a value does not have the type of its field"
	}
	return d.errorAt(join(at, path), reason)
}

// errorAt returns an error with the line and path of a field.
func (d document) errorAt(path, message string) error {
	if path == "" {
		return fmt.Errorf("line %d: %s", d.line(path), message)
	}
	return fmt.Errorf("line %d: %s: %s", d.line(path), path, message)
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// findInvalid returns the path of the first value that does not fit its type, and the reason. It is
// needed because custom decoders, for example of quantities, do not report the field. The reason
// contains no value of a Secret.
func findInvalid(t reflect.Type, value any, path string) (field, reason string) {
	if value == nil {
		return "", ""
	}
	if t.Kind() == reflect.Pointer {
		return findInvalid(t.Elem(), value, path)
	}
	fields, isMap := value.(map[string]any)
	items, isList := value.([]any)
	switch {
	case reflect.PointerTo(t).Implements(unmarshaler):
		return path, checkValue(t, value)
	case isMap && t.Kind() == reflect.Struct:
		return findInvalidField(t, fields, path)
	case isMap && t.Kind() == reflect.Map:
		for _, k := range slices.Sorted(maps.Keys(fields)) {
			if field, reason = findInvalid(t.Elem(), fields[k], join(path, k)); reason != "" {
				return field, reason
			}
		}
		return "", ""
	case isList && t.Kind() == reflect.Slice:
		for i, item := range items {
			if field, reason = findInvalid(t.Elem(), item, fmt.Sprintf("%s[%d]", path, i)); reason != "" {
				return field, reason
			}
		}
		return "", ""
	default:
		return path, checkValue(t, value)
	}
}

// findInvalidField is findInvalid for the fields of a struct.
func findInvalidField(t reflect.Type, value map[string]any, path string) (field, reason string) {
	for f := range t.Fields() {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && (name == "" || options == "inline") {
			field, reason = findInvalidField(f.Type, value, path)
		} else {
			field, reason = findInvalid(f.Type, value[name], join(path, name))
		}
		if reason != "" {
			return field, reason
		}
	}
	return "", ""
}

// checkValue returns the reason why a single value cannot be decoded; "" if it can be decoded.
func checkValue(t reflect.Type, value any) string {
	raw, err := json.Marshal(value)
	if err == nil {
		err = json.Unmarshal(raw, reflect.New(t).Interface())
	}
	mismatch, isMismatch := errors.AsType[*json.UnmarshalTypeError](err)
	switch {
	case err == nil:
		return ""
	case isMismatch:
		got, _, _ := strings.Cut(mismatch.Value, " ") // "number 42" contains a value, which may be secret
		reason := fmt.Sprintf("must be a %s, not %s", typeNames[t.Kind()], got)
		if t.Kind() == reflect.String && (got == "number" || got == "bool") {
			reason += ": put it in quotes"
		}
		return reason
	case t.Kind() == reflect.Slice:
		return "must be base64: encode it, or use stringData (in a ConfigMap: data)"
	default:
		return fmt.Sprintf("%s: %v", raw, err)
	}
}

// typeNames are the names of types in messages.
var typeNames = map[reflect.Kind]string{
	reflect.String: "string", reflect.Bool: "bool", reflect.Struct: "mapping", reflect.Map: "mapping",
	reflect.Slice: "list", reflect.Int32: "32-bit integer", reflect.Int64: "64-bit integer",
}

// line returns the line of a path in the file, counted from 1. If the path does not exist, it returns
// the line of the longest existing prefix.
func (d document) line(path string) int {
	var root yamlnode.Node
	if yamlnode.Unmarshal(d.text, &root) != nil || len(root.Content) == 0 {
		return d.lines + 1
	}
	at := root.Content[0]
	line := at.Line
	for at != nil && path != "" {
		line, at, path = descend(at, line, path)
	}
	return d.lines + line
}

// descend follows the first element of a path. It returns the line and the node of the element, and the
// rest of the path. If the element does not exist, it returns fromLine and no node. A mapping key may
// contain dots.
func descend(from *yamlnode.Node, fromLine int, path string) (line int, to *yamlnode.Node, rest string) {
	switch from.Kind {
	case yamlnode.MappingNode:
		for i := 0; i+1 < len(from.Content); i += 2 {
			rest, found := strings.CutPrefix(path, from.Content[i].Value)
			if found && (rest == "" || rest[0] == '.' || rest[0] == '[') {
				return from.Content[i].Line, from.Content[i+1], strings.TrimPrefix(rest, ".")
			}
		}
	case yamlnode.SequenceNode:
		var i int
		if _, err := fmt.Sscanf(path, "[%d]", &i); err == nil && i < len(from.Content) {
			_, rest, _ := strings.Cut(path, "]")
			return from.Content[i].Line, from.Content[i], strings.TrimPrefix(rest, ".")
		}
	default:
	}
	return fromLine, nil, ""
}

// join appends a name to the path of a field. Both may be empty.
func join(path, name string) string {
	if path == "" || name == "" {
		return path + name
	}
	return path + "." + name
}

// joined returns several errors as one line.
func joined[E error](errs []E) string {
	var texts []string
	for _, err := range errs {
		texts = append(texts, err.Error())
	}
	return strings.Join(texts, "; ")
}
