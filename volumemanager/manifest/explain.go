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

	yamlnode "go.yaml.in/yaml/v3"
	strict "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// aliases are what a parser would quote of a value that begins with an asterisk: it may
// be a password.
var aliases = regexp.MustCompile("(unknown anchor) '.*?'|`.*`")

// explainYAML is why the document is no YAML. It is parsed again behind as many lines as
// there are before it, for the numbers of lines.
func (d document) explainYAML() error {
	_, err := yaml.YAMLToJSONStrict(append(bytes.Repeat([]byte("\n"), d.lines), d.text...))
	reason, ofYAML := strings.CutPrefix(fmt.Sprint(err), "yaml: ")
	if !ofYAML { // it has values
		return d.wrong("", "a key is null or a list, or a number is infinite: JSON has none of these")
	}
	reason = strings.Join(strings.Fields(strings.TrimPrefix(reason, "unmarshal errors:")), " ")
	return errors.New(aliases.ReplaceAllString(reason, "$1 …"))
}

// explain finds the field that an object cannot be decoded for.
func (d document) explain(raw []byte, into any, at string, err error) error {
	if isSyntax, offset := strict.SyntaxErrorOffset(err); isSyntax {
		return fmt.Errorf("line %d: %w", 1+bytes.Count(raw[:min(int(offset), len(raw))], []byte("\n")), err)
	}
	var value any
	if err := json.Unmarshal(raw, &value); err != nil {
		return d.wrong(at, err.Error())
	}
	path, reason := blame(reflect.TypeOf(into).Elem(), value, "")
	if reason == "" { // the error itself may have values
		reason = "a value is not of its field's type"
	}
	return d.wrong(join(at, path), reason)
}

// wrong names a field.
func (d document) wrong(path, what string) error {
	if path == "" {
		return fmt.Errorf("line %d: %s", d.line(path), what)
	}
	return fmt.Errorf("line %d: %s: %s", d.line(path), path, what)
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// blame finds the first value that its type cannot have, and why: decoders of types of
// their own, as of quantities, do not say where they are. The reason has no value that a
// Secret may have.
func blame(t reflect.Type, value any, path string) (field, reason string) {
	if value == nil {
		return "", ""
	}
	if t.Kind() == reflect.Pointer {
		return blame(t.Elem(), value, path)
	}
	fields, isMap := value.(map[string]any)
	items, isList := value.([]any)
	switch {
	case reflect.PointerTo(t).Implements(unmarshaler):
		return path, blameValue(t, value)
	case isMap && t.Kind() == reflect.Struct:
		return blameFields(t, fields, path)
	case isMap && t.Kind() == reflect.Map:
		return blameKeys(t.Elem(), fields, path)
	case isList && t.Kind() == reflect.Slice:
		return blameItems(t.Elem(), items, path)
	default:
		return path, blameValue(t, value)
	}
}

func blameFields(t reflect.Type, value map[string]any, path string) (field, reason string) {
	for f := range t.Fields() {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && (name == "" || options == "inline") {
			field, reason = blameFields(f.Type, value, path)
		} else {
			field, reason = blame(f.Type, value[name], join(path, name))
		}
		if reason != "" {
			return field, reason
		}
	}
	return "", ""
}

func blameKeys(t reflect.Type, value map[string]any, path string) (field, reason string) {
	for _, k := range slices.Sorted(maps.Keys(value)) {
		if field, reason = blame(t, value[k], join(path, k)); reason != "" {
			return field, reason
		}
	}
	return "", ""
}

func blameItems(t reflect.Type, value []any, path string) (field, reason string) {
	for i, item := range value {
		if field, reason = blame(t, item, fmt.Sprintf("%s[%d]", path, i)); reason != "" {
			return field, reason
		}
	}
	return "", ""
}

// blameValue decodes one value on its own.
func blameValue(t reflect.Type, value any) string {
	raw, err := json.Marshal(value)
	if err == nil {
		err = json.Unmarshal(raw, reflect.New(t).Interface())
	}
	mismatch, isMismatch := errors.AsType[*json.UnmarshalTypeError](err)
	switch {
	case err == nil:
		return ""
	case isMismatch:
		is, _, _ := strings.Cut(mismatch.Value, " ") // of a number, the number too
		reason := fmt.Sprintf("must be a %s, not %s", typeNames[t.Kind()], is)
		if t.Kind() == reflect.String && (is == "number" || is == "bool") {
			reason += ": put it in quotes"
		}
		return reason
	case t.Kind() == reflect.Slice:
		return "must be base64: encode it, or use stringData, which a ConfigMap has as data"
	default:
		return fmt.Sprintf("%s: %v", raw, err)
	}
}

var typeNames = map[reflect.Kind]string{
	reflect.String: "string", reflect.Bool: "bool", reflect.Struct: "mapping", reflect.Map: "mapping",
	reflect.Slice: "list", reflect.Int32: "whole number of 32 bits", reflect.Int64: "whole number of 64 bits",
}

// line is the file's that a path is at, or as much of the path as is found; lines count
// from 1.
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

// descend goes one step down a path, whose keys may have dots themselves.
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

func join(path, name string) string {
	if path == "" || name == "" {
		return path + name
	}
	return path + "." + name
}

// joined is several errors in one line.
func joined[E error](errs []E) string {
	var texts []string
	for _, err := range errs {
		texts = append(texts, err.Error())
	}
	return strings.Join(texts, "; ")
}
