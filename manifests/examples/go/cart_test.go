package cart

import "testing"

func TestPricesAreRoundedAfterTheyAreAdded(t *testing.T) {
	if got := Total([]float64{1.4, 1.4}); got != 2.8 {
		t.Errorf("got %v", got)
	}
}
