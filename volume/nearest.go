package volume

import "strings"

// Nearest returns the known word with the smallest edit distance to word. Only the parts before "=" are
// compared. Of several such words it prefers one that has a "=" if and only if word has one. near
// reports whether the distance is at most one plus a quarter of the shorter length.
func Nearest(word string, known []string) (nearest string, near bool) {
	key, _, given := strings.Cut(word, "=")
	least := 0 // the doubled distance of nearest, plus one if only one of the words has a "="
	for _, candidate := range known {
		candidateKey, _, takes := strings.Cut(candidate, "=")
		d := 2 * distance(key, candidateKey)
		if given != takes {
			d++
		}
		if nearest == "" || d < least {
			nearest, least = candidate, d
		}
	}
	return nearest, nearest != "" && least/2 <= 1+min(len(key), len(nearest))/4
}

// distance is the number of bytes to add, remove or replace to change a into b
// (Levenshtein). It compares only the first 80 bytes of a.
func distance(a, b string) int {
	const enough = 80
	a = a[:min(len(a), enough)]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
