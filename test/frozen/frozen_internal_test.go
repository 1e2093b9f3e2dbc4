package frozen

import (
	"reflect"
	"slices"
	"testing"
	"time"
)

// embedded, inner and outer are a type with fields of all kinds.
type embedded struct {
	Own string `json:"own"`
}

type inner struct {
	At   time.Time `json:"at"`
	Next *inner    `json:"next,omitempty"`
}

type outer struct {
	embedded
	List    []inner        `json:"list,omitempty"`
	Map     map[string]int `json:"map"`
	Any     any            `json:"any"`
	Untyped bool
	Skipped string `json:"-"`
}

// TestKeys: Keys finds the keys that encoding/json writes, and no others. A type in itself is visited once.
func TestKeys(t *testing.T) {
	want := []string{"own string", "list[].at string", "map{} integer", "any any", "Untyped boolean"} //nolint:dupword // the key "any" of type any
	if got := Keys(reflect.TypeFor[outer](), "json"); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestPaths: Paths finds the paths of all values, in lists, too.
func TestPaths(t *testing.T) {
	got := Paths(map[string]any{"list": []any{map[string]any{"at": "now"}}})
	if want := []string{"list", "list[]", "list[].at"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestMetrics: Metrics joins the labels of all samples, and omits those of buckets.
func TestMetrics(t *testing.T) {
	got := Metrics("# TYPE seconds histogram\nseconds_bucket{method=\"a\",le=\"1\"} 1\nseconds_sum{method=\"a\"} 1\n", "# TYPE up gauge\nup 1\n# TYPE go_info gauge\ngo_info{version=\"1\"} 1\n")
	if want := []string{"seconds histogram method", "up gauge"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
