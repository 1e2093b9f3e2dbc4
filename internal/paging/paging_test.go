package paging_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/trivet-csi/trivet/internal/paging"
	"github.com/trivet-csi/trivet/volume"
)

// shop is a list in sections, each with sorted entries that begin with its number.
type shop struct {
	mu       sync.Mutex
	sections [][]string
	calls    int
}

func newShop(sizes ...int) *shop {
	s := &shop{}
	for i, size := range sizes {
		var entries []string
		for j := range size {
			entries = append(entries, fmt.Sprintf("%d-%03d", i, j))
		}
		s.sections = append(s.sections, entries)
	}
	return s
}

// page fills a page as a caller of Fill does: the token names the section.
func (s *shop) page(ctx context.Context, token string, limit, parallel, most int) ([]string, string, error) {
	first := 0
	if token != "" {
		if _, err := fmt.Sscanf(token, "%d-", &first); err != nil || first >= len(s.sections) {
			return nil, "", paging.StaleToken(token)
		}
	}
	var sections []paging.Section[string]
	for i := first; i < len(s.sections); i++ {
		sections = append(sections, s.section(i, most))
	}
	return paging.Fill(ctx, sections, token, limit, parallel, func(e string) string { return e })
}

// section returns at most a number of entries at once, whatever the limit.
func (s *shop) section(i, most int) paging.Section[string] {
	return func(_ context.Context, token string, limit int) ([]string, string, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.calls++
		var rest []string
		for _, e := range s.sections[i] {
			if e > token {
				rest = append(rest, e)
			}
		}
		if n := min(limit, most); len(rest) > n {
			return rest[:n], rest[n-1], nil
		}
		return rest, "", nil
	}
}

// TestFill: all pages together are the list, whatever the sizes.
func TestFill(t *testing.T) {
	for _, sizes := range [][]int{{}, {0}, {5}, {0, 0, 3}, {4, 0, 4, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {30, 2, 17, 0}} {
		for _, limit := range []int{1, 2, 3, 4, 100} {
			for _, parallel := range []int{paging.Serial, 4, 32} {
				for _, most := range []int{1, 3, 1000} {
					s := newShop(sizes...)
					var got []string
					token := ""
					for {
						entries, next, err := s.page(t.Context(), token, limit, parallel, most)
						if err != nil || len(entries) > limit || next != "" && len(entries) != limit {
							t.Fatalf("%v by %d: %q, %q, %v", sizes, limit, entries, next, err)
						}
						got = append(got, entries...)
						if token = next; token == "" {
							break
						}
					}
					if want := slices.Concat(s.sections...); !slices.Equal(got, want) {
						t.Errorf("%v by %d, %d at once: %q, want %q", sizes, limit, parallel, got, want)
					}
				}
			}
		}
	}
}

// TestFillWhileChanged: an entry that exists all the time is listed once, whatever entries are created and
// deleted.
func TestFillWhileChanged(t *testing.T) {
	s := newShop(6, 6, 6)
	kept := map[string]int{}
	token, round := "", 0
	for {
		entries, next, err := s.page(t.Context(), token, 2, 4, 2)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			kept[e]++
		}
		if token = next; token == "" {
			break
		}
		for i, section := range s.sections { // the entry of the token is deleted, and another is created
			section = slices.DeleteFunc(section, func(e string) bool { return e == token })
			section = append(section, fmt.Sprintf("%d-%03d+%d", i, round, round))
			slices.Sort(section)
			s.sections[i] = section
		}
		round++
	}
	for e, n := range kept {
		if n != 1 {
			t.Errorf("%s was listed %d times", e, n)
		}
	}
	for _, e := range slices.Concat(s.sections...) {
		if !strings.Contains(e, "+") && kept[e] != 1 {
			t.Errorf("%s was not listed", e)
		}
	}
}

// TestFillEarly: only the first few sections are called if they fill the page.
func TestFillEarly(t *testing.T) {
	s := newShop(slices.Repeat([]int{10}, 100)...)
	if _, _, err := s.page(t.Context(), "", 10, 32, 1000); err != nil || s.calls > 4 {
		t.Errorf("%d calls, %v", s.calls, err)
	}
}

func TestFillFails(t *testing.T) {
	failed := errors.New("no answer")
	sections := []paging.Section[string]{
		newShop(3).section(0, 3),
		func(context.Context, string, int) ([]string, string, error) { return nil, "", failed },
	}
	id := func(e string) string { return e }
	if entries, next, err := paging.Fill(t.Context(), sections, "", 10, 4, id); !errors.Is(err, failed) || entries != nil || next != "" {
		t.Errorf("%q, %q, %v", entries, next, err)
	}
	if _, _, err := newShop(1).page(t.Context(), "7-000", 1, 1, 1); !errors.Is(err, volume.ErrStaleToken) {
		t.Errorf("a token of a section that does not exist: %v", err)
	}
}

func TestLimit(t *testing.T) {
	for given, want := range map[int32]int{0: 5000, 1: 1, 5000: 5000, 5001: 5000} {
		if got, err := paging.Limit(given); got != want || err != nil {
			t.Errorf("%d: %d, %v", given, got, err)
		}
	}
	if _, err := paging.Limit(-1); !errors.Is(err, volume.ErrInvalid) {
		t.Errorf("-1: %v", err)
	}
}
