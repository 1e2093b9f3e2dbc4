package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	strict "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// entry is one object of a file.
type entry struct {
	key    key
	object metav1.Object // nil if there is a problem
	// foreign is set if the kind exists and is not supported, mistyped if it does not exist.
	foreign, mistyped bool
	// problem says why the object is not valid.
	problem string
}

// document is one YAML or JSON document of a file.
type document struct {
	text  []byte
	lines int // the number of lines before it
	json  bool
}

// decode decodes a file. After an error none of its objects is valid: the file may be incomplete.
func decode(data []byte, isJSON bool) ([]entry, error) {
	if !utf8.Valid(data) {
		return nil, errors.New("it is not UTF-8: save it as UTF-8 text")
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

// split returns the documents of a YAML stream (YAML 1.1 §9.1), which may be empty. The parser reads
// the first document and ignores others.
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

// isMarker reports whether a line begins or ends a document.
func isMarker(line []byte) bool {
	if !bytes.HasPrefix(line, []byte("---")) && !bytes.HasPrefix(line, []byte("...")) {
		return false
	}
	next, _ := utf8.DecodeRune(line[markerLength:])
	return len(line) == markerLength || strings.ContainsRune(" \t"+lineBreaks, next)
}

// toJSON returns nil for an empty document.
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

// list contains several objects, as kubectl writes them.
type list struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []json.RawMessage `json:"items"`
}

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
	if err := d.strictly(raw, &l, ""); err != nil {
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

func (d document) header(raw []byte, at string) (head header, err error) {
	if err := strict.UnmarshalCaseSensitivePreserveInts(raw, &head); err != nil {
		return head, d.explain(raw, &head, at, err)
	}
	if head.Kind == "" {
		return head, d.wrong(join(at, "kind"), "it is missing: set one of "+kindNames())
	}
	return head, nil
}

// object decodes the object at a path of the document.
func (d document) object(raw []byte, at string) (entry, error) {
	head, err := d.header(raw, at)
	if err != nil {
		return entry{}, err
	}
	e := entry{key: key{head.Kind, head.Metadata.Namespace, head.Metadata.Name}}
	k, known := kinds[head.Kind]
	if !known {
		e.foreign = isForeign(head.TypeMeta)
		e.mistyped = !e.foreign
		e.problem = fmt.Sprintf("kind: %q is not supported: supported kinds are %s", head.Kind, kindNames())
		return e, nil
	}
	e.key.namespace = k.namespace(e.key.namespace)
	if head.APIVersion != k.apiVersion {
		e.problem = fmt.Sprintf("apiVersion: %q: the apiVersion of a %s is %s", head.APIVersion, head.Kind, k.apiVersion)
		return e, nil
	}
	o := k.empty()
	if err := d.strictly(raw, o, at); err != nil {
		return entry{}, err
	}
	if errs := append(completeMeta(head.Kind, k, o), k.complete(o)...); len(errs) > 0 {
		e.problem = joined(errs)
		return e, nil
	}
	e.object = o
	return e, nil
}

// strictly decodes without unknown fields, duplicate fields and case-insensitive names.
func (d document) strictly(raw []byte, into any, at string) error {
	errs, err := strict.UnmarshalStrict(raw, into)
	if err != nil {
		return d.explain(raw, into, at, err)
	}
	const maxErrors = 5
	for i, err := range errs[:min(maxErrors, len(errs))] {
		if in, ok := errors.AsType[strict.FieldError](err); ok {
			path := in.FieldPath()
			in.SetFieldPath(path[strings.LastIndex(path, ".")+1:])
			errs[i] = d.wrong(join(at, path), in.Error()+": remove it, or correct its name")
		}
	}
	if len(errs) > 0 {
		return errors.New(joined(errs[:min(maxErrors, len(errs))]))
	}
	return nil
}
