package mount

import "testing"

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
