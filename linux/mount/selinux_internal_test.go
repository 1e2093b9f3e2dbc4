package mount

import (
	"errors"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
)

// TestContextIn: the mount table shows a context with categories between double quotes.
func TestContextIn(t *testing.T) {
	for options, want := range map[string]string{
		"rw,seclabel": "",
		"rw":          "",
		"rw,context=system_u:object_r:container_file_t:s0,discard":           "system_u:object_r:container_file_t:s0",
		`rw,context="system_u:object_r:container_file_t:s0:c1,c2",discard`:   "system_u:object_r:container_file_t:s0:c1,c2",
		`rw,fscontext="system_u:object_r:container_file_t:s0:c1,c2",discard`: "",
	} {
		if got := contextIn(options); got != want {
			t.Errorf("%s: got %q, want %q", options, got, want)
		}
	}
}

// TestDifferentContext: the error contains the context of the mounted filesystem, its path, and the other context.
func TestDifferentContext(t *testing.T) {
	const (
		one   = "system_u:object_r:container_file_t:s0:c1,c2"
		other = "system_u:object_r:container_file_t:s0:c3"
	)
	table, err := mountinfo.GetMountsFromReader(strings.NewReader(
		`61 30 7:1 / /staging/one rw,noatime shared:20 - ext4 /dev/loop1 rw,context="`+one+`",discard`+"\n"+
			`62 30 7:2 / /staging/none rw,noatime shared:21 - xfs /dev/loop2 rw,seclabel,attr2`+"\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		at      *Entry
		context string
		says    []string // nil if the contexts are the same
	}{
		{table[0], one, nil},
		{table[0], other, []string{"/staging/one", one, other}},
		{table[0], "", []string{"/staging/one", one, "(none)"}},
		{table[1], one, []string{"/staging/none", "(none)", one}},
		{table[1], "", nil},
	} {
		err := differentContext(tc.at, tc.context)
		if errors.Is(err, ErrOtherContext) != (tc.says != nil) {
			t.Errorf("%s, %q: got error %v, want one: %t", tc.at.Mountpoint, tc.context, err, tc.says != nil)
			continue
		}
		for _, want := range tc.says {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s, %q: got error %v, want %q in it", tc.at.Mountpoint, tc.context, err, want)
			}
		}
	}
}
