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

// testList is a list in sections. Each section has sorted entries, which begin with the section's number.
type testList struct {
	mu       sync.Mutex
	sections [][]string
	calls    int // calls of all sections
}

// newList returns a list with sections of these sizes.
func newList(sizes ...int) *testList {
	s := &testList{}
	for i, size := range sizes {
		var entries []string
		for j := range size {
			entries = append(entries, fmt.Sprintf("%d-%03d", i, j))
		}
		s.sections = append(s.sections, entries)
	}
	return s
}

// page fills a page. The token contains the number of the section in which the page begins.
func (s *testList) page(ctx context.Context, token string, limit, parallel, sectionLimit int) ([]string, string, error) {
	first := 0
	if token != "" {
		if _, err := fmt.Sscanf(token, "%d-", &first); err != nil || first >= len(s.sections) {
			return nil, "", paging.StaleToken(token)
		}
	}
	var sections []paging.Section[string]
	for i := first; i < len(s.sections); i++ {
		sections = append(sections, s.section(i, sectionLimit))
	}
	return paging.Fill(ctx, sections, token, limit, parallel, func(e string) string { return e })
}

// section returns a section whose pages have at most sectionLimit entries.
func (s *testList) section(i, sectionLimit int) paging.Section[string] {
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
		if n := min(limit, sectionLimit); len(rest) > n {
			return rest[:n], rest[n-1], nil
		}
		return rest, "", nil
	}
}

// TestFill: all pages together contain the list, for all sizes of sections and pages.
func TestFill(t *testing.T) {
	for _, sizes := range [][]int{{}, {0}, {5}, {0, 0, 3}, {4, 0, 4, 1}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {30, 2, 17, 0}} {
		for _, limit := range []int{1, 2, 3, 4, 100} {
			for _, parallel := range []int{paging.Serial, 4, 32} {
				for _, sectionLimit := range []int{1, 3, 1000} {
					s := newList(sizes...)
					var got []string
					token := ""
					for {
						entries, next, err := s.page(t.Context(), token, limit, parallel, sectionLimit)
						if err != nil || len(entries) > limit || next != "" && len(entries) != limit {
							t.Fatalf("sections %v, limit %d: got entries %q, token %q, %v, want a full page or the last one", sizes, limit, entries, next, err)
						}
						got = append(got, entries...)
						if token = next; token == "" {
							break
						}
					}
					if want := slices.Concat(s.sections...); !slices.Equal(got, want) {
						t.Errorf("sections %v, limit %d, %d in parallel: got %q, want %q", sizes, limit, parallel, got, want)
					}
				}
			}
		}
	}
}

// TestFillWhileChanged: an entry that exists all the time is listed once, although other entries are created and
// deleted between the pages.
func TestFillWhileChanged(t *testing.T) {
	s := newList(6, 6, 6)
	listed := map[string]int{}
	token, round := "", 0
	for {
		entries, next, err := s.page(t.Context(), token, 2, 4, 2)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			listed[e]++
		}
		if token = next; token == "" {
			break
		}
		for i, section := range s.sections { // delete the entry of the token, and create an entry in each section
			section = slices.DeleteFunc(section, func(e string) bool { return e == token })
			section = append(section, fmt.Sprintf("%d-%03d+%d", i, round, round))
			slices.Sort(section)
			s.sections[i] = section
		}
		round++
	}
	for e, n := range listed {
		if n != 1 {
			t.Errorf("entry %s was listed %d times, want once", e, n)
		}
	}
	for _, e := range slices.Concat(s.sections...) {
		if !strings.Contains(e, "+") && listed[e] != 1 {
			t.Errorf("entry %s was listed %d times, want once", e, listed[e])
		}
	}
}

// TestFillEarly: only the first few sections are called if they fill the page.
func TestFillEarly(t *testing.T) {
	s := newList(slices.Repeat([]int{10}, 100)...)
	if _, _, err := s.page(t.Context(), "", 10, 32, 1000); err != nil || s.calls > 4 {
		t.Errorf("got %d calls of sections, %v, want at most 4", s.calls, err)
	}
}

// TestFillFails: Fill returns the error of a section, and no entries.
func TestFillFails(t *testing.T) {
	failed := errors.New("no answer")
	sections := []paging.Section[string]{
		newList(3).section(0, 3),
		func(context.Context, string, int) ([]string, string, error) { return nil, "", failed },
	}
	id := func(e string) string { return e }
	if entries, next, err := paging.Fill(t.Context(), sections, "", 10, 4, id); !errors.Is(err, failed) || entries != nil || next != "" {
		t.Errorf("got entries %q, token %q, %v, want only %v", entries, next, err, failed)
	}
	if _, _, err := newList(1).page(t.Context(), "7-000", 1, 1, 1); !errors.Is(err, volume.ErrStaleToken) {
		t.Errorf("token of a section that does not exist: got %v, want ErrStaleToken", err)
	}
}

// TestLimit: Limit limits pages to MaxPage entries, and refuses a negative number.
func TestLimit(t *testing.T) {
	for maxEntries, want := range map[int32]int{0: 5000, 1: 1, 5000: 5000, 5001: 5000} {
		if got, err := paging.Limit(maxEntries); got != want || err != nil {
			t.Errorf("Limit(%d): got %d, %v, want %d", maxEntries, got, err, want)
		}
	}
	if _, err := paging.Limit(-1); !errors.Is(err, volume.ErrInvalid) {
		t.Errorf("Limit(-1): got %v, want ErrInvalid", err)
	}
}
