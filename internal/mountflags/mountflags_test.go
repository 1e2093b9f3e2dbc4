package mountflags_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/mountflags"
)

// TestSplit: commas separate words, except between double quotes. A double quote without a second one is an
// ordinary character.
func TestSplit(t *testing.T) {
	for _, tc := range []struct{ flags, want []string }{
		{nil, nil},
		{[]string{""}, nil},
		{[]string{"ro,noatime", "nodev"}, []string{"ro", "noatime", "nodev"}},
		{[]string{",ro,,noatime,"}, []string{"ro", "noatime"}},
		{[]string{`ro,context="s0:c1,c2",noatime`}, []string{"ro", `context="s0:c1,c2"`, "noatime"}},
		{[]string{`x-a="b,noexec`, `nodev"`}, []string{`x-a="b`, "noexec", `nodev"`}},
		{[]string{"a\n,b"}, []string{"a\n", "b"}},
	} {
		if got := mountflags.Split(tc.flags); !slices.Equal(got, tc.want) {
			t.Errorf("%q: got %q, want %q", tc.flags, got, tc.want)
		}
	}
}

func TestParseContext(t *testing.T) {
	longest := strings.Repeat("a", 255)
	for value, want := range map[string]string{
		"system_u:object_r:container_file_t:s0":         "system_u:object_r:container_file_t:s0",
		`"system_u:object_r:container_file_t:s0:c1,c2"`: "system_u:object_r:container_file_t:s0:c1,c2",
		`"u:r:t:s0-s15:c0.c1023"`:                       "u:r:t:s0-s15:c0.c1023",
		longest:                                         longest,
		`"` + longest + `"`:                             longest,
		longest + "a":                                   "",
		`"` + longest + `a"`:                            "",
		"system_u:object_r:container_file_t:s0:c1,c2":   "", // mount(8) would separate it at the comma
		`"system_u:object_r:container_file_t:s0`:        "",
		`a"b"`:                                          "",
		`""`:                                            "",
		"":                                              "",
		"a b":                                           "",
		"a\n":                                           "",
		`"a=b"`:                                         "",
	} {
		if got, ok := mountflags.ParseContext(value); got != want || ok != (want != "") {
			t.Errorf("%q: got %q, %t, want %q", value, got, ok, want)
		}
	}
	word := mountflags.ForContext("u:r:t:s0:c1,c2")
	value, isContext := strings.CutPrefix(word, mountflags.Context+"=")
	if got, ok := mountflags.ParseContext(value); !isContext || !mountflags.IsContext(word) || !ok || got != "u:r:t:s0:c1,c2" {
		t.Errorf("got %q from the word %q", got, word)
	}
	if mountflags.IsContext("fscontext=a") {
		t.Error("fscontext is taken for context")
	}
}
