package frozen_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/test/frozen"
)

// schema is a part of a JSON schema.
type schema struct {
	Ref                  string             `json:"$ref"`
	Definitions          map[string]*schema `json:"definitions"`
	Properties           map[string]*schema `json:"properties"`
	Items                *schema            `json:"items"`
	AdditionalProperties json.RawMessage    `json:"additionalProperties"`
	AllOf, AnyOf, OneOf  []*schema
	Not                  json.RawMessage
}

// forbidden reports whether the schema accepts no value.
func (s *schema) forbidden() bool { return string(s.Not) == "{}" }

// TestFrozenValues: the values of the chart keep their names.
func TestFrozenValues(t *testing.T) {
	b, err := os.ReadFile("../../deploy/chart/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var root schema
	if err := json.Unmarshal(b, &root); err != nil {
		t.Fatal(err)
	}
	frozen.List(t, "values", root.paths(t, &root, ""))
}

// paths returns the paths of all properties of a part of the schema at a path.
func (s *schema) paths(t *testing.T, root *schema, path string) (all []string) {
	t.Helper()
	if s == nil || s.forbidden() {
		return nil
	}
	if path != "" {
		all = append(all, path)
	}
	if name, ok := strings.CutPrefix(s.Ref, "#/definitions/"); ok {
		all = append(all, root.Definitions[name].paths(t, root, path)...)
	} else if s.Ref != "" {
		t.Fatalf("%s: the reference %s is not to a definition", path, s.Ref)
	}
	for name, property := range s.Properties {
		all = append(all, property.paths(t, root, strings.TrimPrefix(path+"."+name, "."))...)
	}
	all = append(all, s.Items.paths(t, root, path+"[]")...)
	var values schema
	if json.Unmarshal(s.AdditionalProperties, &values) == nil { // it is an object, not a boolean
		all = append(all, values.paths(t, root, path+"{}")...)
	}
	for _, alternatives := range [][]*schema{s.AllOf, s.AnyOf, s.OneOf} {
		for _, one := range alternatives {
			all = append(all, one.paths(t, root, path)...)
		}
	}
	return all
}
