// Package frozen fails the tests of a package that changes a frozen format (docs/design/formats.md). The golden
// files are below testdata/frozen of the package that owns the format. They are part of a release:
//
//   - [List] compares names, such as the keys of the configuration. Names may be added, but not removed or renamed.
//   - [Format] reads and writes records. A golden record stays readable, and is written with the same bytes.
//
// The flag -update adds what is missing in the golden files.
package frozen

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"flag"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Update is the flag -update. Tests of a package with generated files use it, too, because a test binary cannot have
// two flags of one name.
var Update = flag.Bool("update", false, "add new entries and records to the golden files of frozen formats, and write generated files")

var incompatible = flag.Bool("incompatible", false, "with -update: also remove entries and replace records, which is an incompatible change (docs/design/formats.md)")

// dir is the directory of the golden files in the package that owns a format.
const dir = "testdata/frozen"

const rule = "removing or renaming is an incompatible change (docs/design/formats.md)"

// List fails the test if an entry of the golden list is not in entries, and if an entry is not in the golden list.
// The file has one entry in each line, sorted. The order of entries does not matter.
func List(t *testing.T, name string, entries []string) {
	t.Helper()
	path := filepath.Join(dir, name+".txt")
	golden, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	entries = slices.Compact(slices.Sorted(slices.Values(entries)))
	known := slices.DeleteFunc(strings.Split(string(golden), "\n"), func(line string) bool { return line == "" })
	missing, added := without(known, entries), without(entries, known)
	if *Update && (len(missing) == 0 || *incompatible) {
		write(t, path, []byte(strings.Join(entries, "\n")+"\n"))
		return
	}
	if len(missing) > 0 {
		t.Errorf("the following entries of %s no longer exist: %s\n%s", path, rule, strings.Join(missing, "\n"))
	}
	if len(added) > 0 {
		t.Errorf("the following entries are not in %s: run the test with -update to add them; %s\n%s", path, rule, strings.Join(added, "\n"))
	}
}

// without returns the elements of all that are not in other.
func without(all, other []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(s string) bool { return slices.Contains(other, s) })
}

// Bytes fails the test if got differs from a golden file.
func Bytes(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join(dir, name)
	want, err := os.ReadFile(path)
	switch {
	case *Update && (errors.Is(err, fs.ErrNotExist) || *incompatible):
		write(t, path, got)
	case errors.Is(err, fs.ErrNotExist):
		t.Errorf("%s does not exist: run the test with -update to add it; %s", path, rule)
	case err != nil:
		t.Fatal(err)
	case !bytes.Equal(got, want):
		t.Errorf("%s: the current code writes\n%s\nwant the bytes of the file; %s\n%s", path, got, rule, want)
	}
}

func write(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
}

// Format is a durable format of JSON records of type T.
type Format[T any] struct {
	// Dir is the directory of the golden records below testdata/frozen.
	Dir string
	// Read and Write are the functions with which the driver reads and writes a record.
	Read  func([]byte) (T, error)
	Write func(T) ([]byte, error)
}

// Test compares the golden records with their values, which have the names of the files without ".json". It fails if
// a golden record is not read into exactly its value, if a value is not written as its golden record, and if a
// golden record has no value. If T is a struct, it also fails if no golden record has some field of T.
func (f Format[T]) Test(t *testing.T, values map[string]T) {
	t.Helper()
	f.TestPart(t, "", values)
}

// TestPart is Test for a T that is only the part at a path of the records, such as "section".
func (f Format[T]) TestPart(t *testing.T, part string, values map[string]T) {
	t.Helper()
	found := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		got, err := f.Write(values[name])
		if err != nil {
			t.Fatalf("writing %s: %v", name, err)
		}
		file := filepath.Join(f.Dir, name+".json")
		Bytes(t, file, got)
		golden, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			continue // Bytes has failed the test
		}
		if read, err := f.Read(golden); err != nil || !reflect.DeepEqual(read, values[name]) {
			t.Errorf("%s is read as\n%+v, %v\nwant\n%+v", file, read, err, values[name])
		}
		var content any
		if err := json.Unmarshal(golden, &content); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, path := range Paths(content) {
			found[path] = true
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, f.Dir, "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if _, tested := values[strings.TrimSuffix(filepath.Base(file), ".json")]; !tested {
			t.Errorf("%s has no value in this test: a golden record must stay readable", file)
		}
	}
	if reflect.TypeFor[T]().Kind() != reflect.Struct {
		return
	}
	for _, key := range Keys(reflect.TypeFor[T](), "json") {
		if path, _, _ := strings.Cut(key, " "); !found[join(part, path)] {
			t.Errorf("no golden record in %s has the field %s: add a value that has it, and run the test with -update", filepath.Join(dir, f.Dir), join(part, path))
		}
	}
}

// Paths returns the paths of all values in decoded JSON or YAML, as Keys writes them, without types.
func Paths(value any) []string { return appendPaths(nil, "", value) }

func appendPaths(all []string, path string, value any) []string {
	if path != "" {
		all = append(all, path)
	}
	switch v := value.(type) {
	case map[string]any:
		for key, one := range v {
			all = appendPaths(all, join(path, key), one)
		}
	case []any:
		for _, one := range v {
			all = appendPaths(all, path+"[]", one)
		}
	}
	return all
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// Keys returns the keys of a type in the encoding that a struct tag (json or yaml) describes, each as `path type`,
// such as `pools[].nfs.init boolean`. Elements of a list have the path `list[]`, values of a map `map{}`.
func Keys(t reflect.Type, tag string) []string {
	k := keys{tag: tag}
	k.add("", t)
	return k.found
}

// keys collects the keys of a type.
type keys struct {
	tag   string
	found []string
	// above are the structs that contain the current value, because a type may contain itself.
	above []reflect.Type
}

func (k *keys) add(path string, t reflect.Type) {
	switch name := k.scalar(t); {
	case name != "":
		k.found = append(k.found, strings.TrimPrefix(path+" "+name, " "))
	case t.Kind() == reflect.Pointer:
		k.add(path, t.Elem())
	case t.Kind() == reflect.Slice:
		k.add(path+"[]", t.Elem())
	case t.Kind() == reflect.Map:
		k.add(path+"{}", t.Elem())
	case t.Kind() == reflect.Struct && !slices.Contains(k.above, t):
		k.above = append(k.above, t)
		for i := range t.NumField() {
			k.addField(path, t.Field(i))
		}
		k.above = k.above[:len(k.above)-1]
	}
}

func (k *keys) addField(path string, field reflect.StructField) {
	name, options, tagged := strings.Cut(field.Tag.Get(k.tag), ",")
	switch {
	case name == "-", !field.IsExported() && !field.Anonymous, k.tag == "yaml" && name == "" && tagged && field.Type.Kind() == reflect.Map:
	case name == "" && (field.Anonymous || slices.Contains(strings.Split(options, ","), "inline")):
		k.add(path, field.Type)
	case name == "":
		k.add(join(path, field.Name), field.Type)
	default:
		k.add(join(path, name), field.Type)
	}
}

// scalar returns the name of a type without keys; empty if the type has keys.
func (k *keys) scalar(t reflect.Type) string {
	if t.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
		return "string"
	}
	if t.Implements(reflect.TypeFor[json.Marshaler]()) {
		return "any"
	}
	switch t.Kind() {
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "boolean"
	case reflect.Float32, reflect.Float64:
		return "number"
	case reflect.Interface:
		return "any"
	case reflect.Pointer, reflect.Slice, reflect.Map, reflect.Struct:
		return ""
	default:
		return "integer"
	}
}

// JSON returns the format of records that are read and written without further checks.
func JSON[T any](dir string) Format[T] {
	return Format[T]{
		Dir: dir, Read: func(b []byte) (v T, err error) { return v, json.Unmarshal(b, &v) }, Write: func(v T) ([]byte, error) { return json.Marshal(v) },
	}
}

var (
	metricType   = regexp.MustCompile(`(?m)^# TYPE (\S+) (\S+)$`)
	metricSample = regexp.MustCompile(`(?m)^(\w+)\{(.*)\} `)
	metricLabel  = regexp.MustCompile(`(\w+)="(?:[^"\\]|\\.)*"`)
)

// Metrics returns the metrics in pages of Prometheus, each as `name type label,label`. It omits those of the Go
// runtime and of the process, and the labels of buckets.
func Metrics(pages ...string) []string {
	page := strings.Join(pages, "\n")
	labels := map[string][]string{}
	for _, sample := range metricSample.FindAllStringSubmatch(page, -1) {
		name := sample[1]
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			name = strings.TrimSuffix(name, suffix)
		}
		for _, label := range metricLabel.FindAllStringSubmatch(sample[2], -1) {
			if label[1] != "le" {
				labels[name] = append(labels[name], label[1])
			}
		}
	}
	var all []string
	for _, m := range metricType.FindAllStringSubmatch(page, -1) {
		if name := m[1]; !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			all = append(all, strings.TrimSuffix(name+" "+m[2]+" "+strings.Join(slices.Compact(slices.Sorted(slices.Values(labels[name]))), ","), " "))
		}
	}
	return all
}
