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

// aliases matches the quoted values in parser errors about YAML aliases. A value that begins with an
// asterisk may be a password.
var aliases = regexp.MustCompile("(unknown anchor) '.*?'|`.*`")

// explainYAML says why the document is not valid YAML. It parses the document again after as many empty
// lines as precede it in the file, so that the parser reports the right line.
func (d document) explainYAML() error {
	_, err := yaml.YAMLToJSONStrict(append(bytes.Repeat([]byte("\n"), d.lines), d.text...))
	reason, ofYAML := strings.CutPrefix(fmt.Sprint(err), "yaml: ")
	if !ofYAML { // the error contains values
		return d.wrong("", "a key is null or a list, or a number is infinite, which JSON does not allow")
	}
	reason = strings.Join(strings.Fields(strings.TrimPrefix(reason, "unmarshal errors:")), " ")
	return errors.New(aliases.ReplaceAllString(reason, "$1 …"))
}

// explain returns an error that names the field because of which an object cannot be decoded.
func (d document) explain(raw []byte, into any, at string, err error) error {
	if isSyntax, offset := strict.SyntaxErrorOffset(err); isSyntax {
		return fmt.Errorf("line %d: %w", 1+bytes.Count(raw[:min(int(offset), len(raw))], []byte("\n")), err)
	}
	var value any
	if err := json.Unmarshal(raw, &value); err != nil {
		return d.wrong(at, err.Error())
	}
	path, reason := blame(reflect.TypeOf(into).Elem(), value, "")
	if reason == "" { // err may contain values of a Secret
		reason = "a value does not have the type of its field"
	}
	return d.wrong(join(at, path), reason)
}

// wrong returns an error with the line and path of a field.
func (d document) wrong(path, what string) error {
	if path == "" {
		return fmt.Errorf("line %d: %s", d.line(path), what)
	}
	return fmt.Errorf("line %d: %s: %s", d.line(path), path, what)
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// blame finds the first value that its type cannot hold, and says why. It is needed because custom
// decoders, for example of quantities, do not report the field. The reason contains no value of a
// Secret.
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
		for _, k := range slices.Sorted(maps.Keys(fields)) {
			if field, reason = blame(t.Elem(), fields[k], join(path, k)); reason != "" {
				return field, reason
			}
		}
		return "", ""
	case isList && t.Kind() == reflect.Slice:
		for i, item := range items {
			if field, reason = blame(t.Elem(), item, fmt.Sprintf("%s[%d]", path, i)); reason != "" {
				return field, reason
			}
		}
		return "", ""
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

// blameValue says why a single value cannot be decoded; "" if it can.
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
		got, _, _ := strings.Cut(mismatch.Value, " ") // without the value of a number
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

var typeNames = map[reflect.Kind]string{
	reflect.String: "string", reflect.Bool: "bool", reflect.Struct: "mapping", reflect.Map: "mapping",
	reflect.Slice: "list", reflect.Int32: "32-bit integer", reflect.Int64: "64-bit integer",
}

// line returns the line of a path in the file, counted from 1. If the path does not exist, it returns
// that of the longest part that does.
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

// descend follows the first element of a path, which may contain dots.
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

// joined returns several errors as one line.
func joined[E error](errs []E) string {
	var texts []string
	for _, err := range errs {
		texts = append(texts, err.Error())
	}
	return strings.Join(texts, "; ")
}
