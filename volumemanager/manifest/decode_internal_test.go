package manifest

import (
	"fmt"
	"strings"
	"testing"
)

// TestDecodeInvalid: the error about a file that cannot be decoded names the line and the field.
func TestDecodeInvalid(t *testing.T) {
	const head = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"
	for name, c := range map[string]struct {
		text string
		json bool
		want string
	}{
		"unknown field": {
			head + "---\napiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  volumes:\n  - name: a\n    emptyDirr: {}\n", false,
			`document 2, line 11: spec.volumes[0].emptyDirr: unknown field "emptyDirr"`,
		},
		"wrong case":          {"apiVersion: v1\nkind: ConfigMap\nMetadata: {name: a}\n", false, `line 3: Metadata: unknown field`},
		"duplicate key":       {head + "---\n# a comment\n" + head + "kind: Pod\n", false, `document 2, line 9: key "kind" already set`},
		"not YAML":            {"\n\n---\n\n\na: [\n", false, "document 1, line 6"},
		"wrong type":          {"apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  volumes:\n    a: 1\n", false, "line 5: spec.volumes: must be a list, not object"},
		"number for a string": {head + "data:\n  a.b: 1\n", false, "line 5: data.a.b: must be a string, not number: put it in quotes"},
		"embedded field":      {"apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  volumes:\n  - emptyDir:\n      medium: 1\n", false, "line 7: spec.volumes[0].emptyDir.medium: must be a string"},
		"quantity": {
			"apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: a}\nspec:\n  resources:\n    requests:\n      storage: 10 GB\n", false,
			`line 7: spec.resources.requests.storage: "10 GB": quantities must match`,
		},
		"not base64": {"apiVersion: v1\nkind: Secret\nmetadata: {name: a}\ndata:\n  key: '*'\n", false, "line 5: data.key: must be base64"},
		"no kind":    {"apiVersion: v1\nmetadata: {name: a}\n", false, "line 1: kind: it is missing: set one of CSIDriver, ConfigMap"},
		"a list":     {"- a\n", false, "line 1: must be a mapping, not array"},
		"null key":   {head + "data: {null: a}\n", false, "a key is null"},
		"in a List": {
			"apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: ConfigMap\n  metadata: {name: a}\n  dato: {}\n", false,
			`line 7: items[0].dato: unknown field "dato"`,
		},
		"JSON":               {"{\"kind\":\n\"Pod\",\n}", true, "document 1, line 3: invalid character"},
		"two JSON documents": {"{}\n{}", true, "line 2: invalid character"},
		"duplicate in JSON":  {"{\"apiVersion\": \"v1\", \"kind\": \"ConfigMap\",\n\"data\": {\"a\": \"1\",\n\"a\": \"2\"}}", true, `data.a: duplicate field "a"`},
	} {
		entries, err := decode([]byte(c.text), c.json)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got entries %v, error %v; want an error with %q", name, entries, err, c.want)
		}
	}
}

// TestDecodeKeepsSecrets: no error contains the values of a Secret.
func TestDecodeKeepsSecrets(t *testing.T) {
	for _, value := range []string{
		"{password: *hunter2}", "{password: !!float hunter2}", "{null: hunter2}", "{[a]: hunter2}", "{password: [hunter2]}",
		"{password: !!int hunter2}", "{password: hunter2", "{password: {hunter2: a}}", "{a/b: hunter2}", "{password: 4242424242}", "[hunter2]", "hunter2",
		"{password: !<hunter2> a}", "{password: 'hunter2}", "{password: \"hunter2\\q\"}", "{password: !hunter2!a b}",
	} {
		for _, field := range []string{"data", "stringData"} {
			entries, err := decode(fmt.Appendf(nil, "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n%s: %s\n", field, value), false)
			message := fmt.Sprint(err)
			for _, e := range entries {
				message += e.problem
			}
			if strings.Contains(message, "hunter2") || strings.Contains(message, "4242") {
				t.Errorf("%s: %s: the message contains the value: %s", field, value, message)
			}
			if err == nil && (len(entries) != 1 || entries[0].object != nil && !strings.Contains(value, "!")) {
				t.Errorf("%s: %s: got entries %v, want one with a problem", field, value, entries)
			}
		}
	}
}

// TestSplit: split returns the documents of a file. In the expected results, each document is the number of
// lines before it, and its text.
func TestSplit(t *testing.T) {
	for text, want := range map[string]string{
		"":                          "",
		"a":                         "0 a",
		"---\na\n---\nb\n":          "0 ---\na\n|2 ---\nb\n",
		"a\r\n---\r\nb":             "0 a\r\n|1 ---\r\nb",
		"a\r---\rb":                 "0 a\r|1 ---\rb",
		"a\u2028---\u0085b":         "0 a\u2028|1 ---\u0085b",
		"a\n...\nb\n--- # c\nd":     "0 a\n|1 \nb\n|3 --- # c\nd",
		"a: |\n  ---\n  b\n----\nc": "0 a: |\n  ---\n  b\n----\nc",
		"---\n---\n---":             "0 ---\n|1 ---\n|2 ---",
	} {
		var got []string
		for _, d := range split([]byte(text)) {
			if len(d.text) > 0 {
				got = append(got, fmt.Sprintf("%d %s", d.lines, d.text))
			}
		}
		if strings.Join(got, "|") != want {
			t.Errorf("%q: got %q, want %q", text, strings.Join(got, "|"), want)
		}
	}
}

// TestSplitAsParser: split separates two documents wherever the YAML parser does.
func TestSplitAsParser(t *testing.T) {
	const a, b = "{apiVersion: v1, kind: ConfigMap, metadata: {name: a}}", "{apiVersion: v1, kind: ConfigMap, metadata: {name: b}}"
	for _, between := range []string{"\n---\n", "\r---\r", "\r\n--- ", "\n...\n", "\n...\n---\n", "\u2029---\u2029", "\n---\t", "\n--- # next\n", "\n---\n---\n", "\n---\n# nothing\n---\n", "\n--- |\n x\n---\n"} {
		entries, err := decode([]byte(a+between+b), false)
		if err != nil && strings.Contains(between, "|") {
			continue // the document between the two is a string and not an object
		}
		if err != nil || len(entries) != 2 || entries[1].key.name != "b" {
			t.Errorf("%q: got entries %v, error %v; want ConfigMaps a and b", between, entries, err)
		}
	}
}
